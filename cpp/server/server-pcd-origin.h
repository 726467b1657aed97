// Who may ask a server without an API key. Knows names and addresses, nothing of requests' bodies.

#pragma once

#include "json.h"

#include <string>
#include <vector>

struct server_pcd_asked {
    std::vector<std::string> listens; // --host
    std::string origins;  // --cors-origins
    bool        has_keys;
    std::string host;     // of the request
    std::string origin;   // of the request; empty: not a browser's, a page of ours, or a picture of any page
    std::string site;     // what the browser says of where it comes from (Sec-Fetch-Site), and what for
    std::string mode;
};

// empty: it may
std::string server_pcd_refusal_of_origin(const server_pcd_asked & asked);

// Whether the request may be answered; else it has been, with 403. Each answer tells browsers to show it in no other page, which could have
// the buttons of ours clicked, and to take it for nothing but what it says it is.
template <typename Params, typename Request, typename Response>
bool server_pcd_admits(const Params & params, const Request & req, Response & res) {
    res.set_header("Content-Security-Policy", "frame-ancestors 'none'");
    res.set_header("X-Content-Type-Options", "nosniff");
    const std::string refusal = server_pcd_refusal_of_origin(
        { params.hostnames, params.cors_origins, !params.api_keys.empty(), req.get_header_value("Host"), req.get_header_value("Origin"),
          req.get_header_value("Sec-Fetch-Site"), req.get_header_value("Sec-Fetch-Mode") });
    if (refusal.empty()) {
        return true;
    }
    res.status = 403;
    const common_json error = { { "code", 403 }, { "message", refusal }, { "type", "permission_error" } };
    res.set_content(common_json { { "error", error } }.dump_safe(), "application/json; charset=utf-8");
    return false;
}
