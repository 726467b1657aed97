// Who may ask a server without an API key: not the pages of other sites that are open in a browser here.
//
// A browser sends Origin with what a page asks of another site. And a page whose name was made to lead here (DNS rebinding) asks, as
// the browser sees it, its own site: then Host has that name. Programs are not bound by either; keys are for them.

#include "server-pcd-origin.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <sstream>

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
    const auto is_of = [&](const char * chars) { return host.find_first_not_of(chars) == std::string::npos; };
    return (!host.empty() && host.front() == '[') || (is_of("0123456789.") && !host.empty());
}

static bool is_local(const std::string & host) {
    const std::string end = ".localhost"; // never leaves a machine (RFC 6761)
    return host == "localhost" || host == "127.0.0.1" || host == "[::1]" || host == "::1" ||
        (host.size() > end.size() && host.compare(host.size() - end.size(), end.size(), end) == 0);
}

static std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return (char) std::tolower(c); });
    return text;
}

// of a list with commas
static std::vector<std::string> items_of(const std::string & text) {
    std::vector<std::string> res;
    std::istringstream list(lower(text));
    for (std::string item; std::getline(list, item, ','); ) {
        item.erase(std::remove_if(item.begin(), item.end(), [](unsigned char c) { return std::isspace(c); }), item.end());
        res.push_back(item);
    }
    return res;
}

static std::string host_of(const std::string & origin) {
    const size_t start = origin.find("://");
    return start == std::string::npos ? "" : without_port(origin.substr(start + 3));
}

std::string server_pcd_refusal_of_origin(const server_pcd_asked & asked) {
    if (asked.has_keys || asked.origins == "*") {
        return "";
    }
    const std::string host   = lower(without_port(asked.host));
    const std::string origin = lower(asked.origin);

    const std::vector<std::string> allowed = items_of(asked.origins);

    const char * given = std::getenv("PYPCD_HOST"); // behind a router the server listens elsewhere, and gets what the router was asked
    const std::vector<std::string> listens = given ? items_of(given) : asked.listens;

    const bool is_own = std::any_of(listens.begin(), listens.end(), [&](const std::string & cur) { return lower(cur) == host; });

    const auto is_listed = [&](auto && of, const std::string & text) {
        return std::any_of(allowed.begin(), allowed.end(), [&](const std::string & cur) { return of(cur) == text; });
    };
    if (!host.empty() && !is_address(host) && !is_local(host) && !is_own && !is_listed(host_of, host)) {
        return "Host is '" + host + "'; allowed: this machine's addresses, localhost; `-- --cors-origins http://" + host +
            "` allows it, as does `--api-key`";
    }
    const auto itself = [](const std::string & text) { return text; };
    const std::string same = lower(asked.host);
    const bool is_same = origin == "http://" + same || origin == "https://" + same;
    if (!origin.empty() && !is_local(host_of(origin)) && !is_same && !is_listed(itself, origin)) {
        return "Origin is '" + origin + "'; allowed: pages of this machine; `-- --cors-origins " + origin +
            "` allows it, as does `--api-key`";
    }
    if (origin.empty() && asked.site == "cross-site" && asked.mode != "navigate") { // a link to the page may be followed
        return "Sec-Fetch-Site is 'cross-site'; allowed: pages of this machine; `-- --cors-origins '*'` allows it, as does `--api-key`";
    }
    return "";
}
