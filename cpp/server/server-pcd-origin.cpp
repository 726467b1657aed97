// Who may ask a server without an API key: not the pages of other sites that are open in a browser here.
//
// A browser sends Origin with what a page asks of another site. And a page whose name was made to lead here (DNS rebinding) asks, as
// the browser sees it, its own site: then Host has that name. Programs are not bound by either; keys are for them.

#include "server-pcd.h"

#include "common.h"

#include <cpp-httplib/httplib.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>

using json = common_json;

// name or address and port, as in Host
static std::string without_port(const std::string & host) {
    const size_t bracket = host.rfind(']'); // [::1]:8080
    const size_t colon   = host.rfind(':');
    if (colon == std::string::npos || (bracket != std::string::npos && colon < bracket)) {
        return host;
    }
    return host.substr(0, colon);
}

static bool is_address(const std::string & host) {
    return !host.empty() && (host.front() == '[' || host.find_first_not_of("0123456789.") == std::string::npos);
}

static bool is_local(const std::string & host) {
    // .localhost never leaves a machine (RFC 6761)
    return host == "localhost" || host == "127.0.0.1" || host == "[::1]" || host == "::1" || string_ends_with(host, ".localhost");
}

static std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return (char) std::tolower(c); });
    return text;
}

// of a list with commas
static std::vector<std::string> items_of(const std::string & text) {
    auto res = string_split<std::string>(lower(text), ',');
    std::transform(res.begin(), res.end(), res.begin(), string_strip);
    return res;
}

static std::string host_of(const std::string & origin) {
    const size_t start = origin.find("://");
    return start == std::string::npos ? "" : without_port(origin.substr(start + 3));
}

// empty: it may
static std::string refusal_of(const common_params & params, const httplib::Request & req) {
    if (!params.api_keys.empty() || params.cors_origins == "*") {
        return "";
    }
    const std::string asked  = lower(req.get_header_value("Host"));
    const std::string host   = without_port(asked);
    const std::string origin = lower(req.get_header_value("Origin")); // empty: not a browser's, a page of ours, or a picture of any page

    const std::vector<std::string> allowed = items_of(params.cors_origins);

    const char * given = std::getenv("PYPCD_HOST"); // behind a router the server listens elsewhere, and gets what the router was asked
    const std::vector<std::string> listens = given ? items_of(given) : params.hostnames;

    const bool is_own = std::any_of(listens.begin(), listens.end(), [&](const std::string & cur) { return lower(cur) == host; });

    const bool is_proxy = std::any_of(allowed.begin(), allowed.end(), [&](const std::string & cur) { return host_of(cur) == host; });
    if (!host.empty() && !is_address(host) && !is_local(host) && !is_own && !is_proxy) {
        return "Host is '" + host + "'; allowed: this machine's addresses, localhost; `-- --cors-origins http://" + host +
            "` allows it, as does `--api-key`";
    }
    const bool is_same = origin == "http://" + asked || origin == "https://" + asked;
    const bool is_listed = std::find(allowed.begin(), allowed.end(), origin) != allowed.end();
    if (!origin.empty() && !is_local(host_of(origin)) && !is_same && !is_listed) {
        return "Origin is '" + origin + "'; allowed: pages of this machine; `-- --cors-origins " + origin +
            "` allows it, as does `--api-key`";
    }
    const bool is_elsewhere = req.get_header_value("Sec-Fetch-Site") == "cross-site"; // as the browser says
    if (origin.empty() && is_elsewhere && req.get_header_value("Sec-Fetch-Mode") != "navigate") { // a link to the page may be followed
        return "Sec-Fetch-Site is 'cross-site'; allowed: pages of this machine; `-- --cors-origins '*'` allows it, as does `--api-key`";
    }
    return "";
}

bool server_pcd_admits(const common_params & params, const httplib::Request & req, httplib::Response & res) {
    res.set_header("Content-Security-Policy", "frame-ancestors 'none'");
    res.set_header("X-Content-Type-Options", "nosniff");
    const std::string refusal = refusal_of(params, req);
    if (refusal.empty()) {
        return true;
    }
    res.status = 403;
    const json error = { { "code", 403 }, { "message", refusal }, { "type", "permission_error" } };
    res.set_content(json { { "error", error } }.dump_safe(), "application/json; charset=utf-8");
    return false;
}
