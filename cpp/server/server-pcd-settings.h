// The settings of a server with PCD: those that `pypcd serve` gave it, what its context can run of them, and what a request makes of
// them, which pypcd's Python says. Knows fields by name, but not what their values mean, and nothing of slots.

#pragma once

#include "json.h"
#include "server-pcd.h"
#include "twins/settings.h"

#include <set>
#include <string>
#include <utility>
#include <vector>

// Requests are read by many threads, so all but is_on stays as it is while they come.
struct server_pcd_settings {
    bool is_given   = false; // LLAMA_ARG_PCD is set
    bool by_default = false; // for requests that say nothing
    bool required   = true;  // false: where PCD cannot run, the server goes on without it

    server_pcd_request setting;              // the server's, which an object of fields changes
    common_json        fixed;                // what all settings have in common here, for Python
    std::vector<llama_pcd_params> contexts;  // what the context may be set to; the first that runs is
    std::vector<std::pair<std::string, server_pcd_request>> presets;
    std::string recommended;                 // the one that "on" and true mean
    std::set<std::string> names;             // the model's
    common_json sentences;                   // what PCD did, from Python (pypcd/engine/_results.py), with names in braces

    // since the context was made
    const llama_vocab * vocab = nullptr;
    int32_t     n_ctx = 0;      // tokens of a prompt and its answer
    common_json disk;           // server_pcd_disk()
    bool        is_on = false;  // in the context
    std::string refusal;        // why PCD cannot run here
    llama_pcd_params context = {};
    std::vector<std::string> runs; // presets that requests may name

    void read(const common_json & given, const llama_context * ctx, const common_params & params); // for the model of this context

    // What a request's field "pcd" means (pypcd/server/__init__.py, requested()); base: what an object of fields changes. Throws
    // std::invalid_argument if the client is to blame.
    server_pcd_request of(const common_json & given, const server_pcd_request & base) const;

    const server_pcd_request * preset(const std::string & name) const; // null: there is none
};

// why "<model>:<end>" is refused
std::string server_pcd_wrong_name(const std::string & name, const std::string & model, const std::vector<std::string> & suffixes);

extern server_pcd_settings server_pcd;
