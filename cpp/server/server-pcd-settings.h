// The settings of a server with PCD: those that `pypcd serve` gave it, what its context can run of them, and what a request makes of
// them. Knows fields by name and values as JSON, but nothing of slots.

#pragma once

#include "json.h"
#include "server-pcd-disk.h"
#include "twins/settings.h"

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

// Requests are read by many threads, so all but is_on stays as it is while they come.
struct server_pcd_settings {
    bool is_given   = false; // LLAMA_ARG_PCD is set
    bool by_default = false; // for requests that say nothing
    bool required   = true;  // false: where PCD cannot run, the server goes on without it

    llama_pcd_params setting = {};           // the server's, which an object of fields changes
    llama_pcd_params paper   = {};           // where a text begins that names no preset
    std::vector<llama_pcd_params> contexts;  // what the context may be set to; the first that runs is
    std::vector<std::pair<std::string, llama_pcd_params>> presets;
    std::string recommended;                 // the one that "on" and true mean
    std::set<std::string> names;             // the model's
    std::map<std::string, std::string> sentences; // what PCD did, from Python (pypcd/engine/_results.py), with names in braces

    // since the context was made
    const llama_vocab * vocab = nullptr;
    int32_t     n_ctx = 0;      // tokens of a prompt and its answer
    common_json disk;           // server_pcd_disk()
    bool        is_on = false;  // in the context
    std::string refusal;        // why PCD cannot run here
    llama_pcd_params context = {};
    std::vector<std::string> runs; // presets that requests may name

    void read(const common_json & given, const llama_context * ctx, const common_params & params); // for the model of this context

    bool is_own  (const pcd_field & field) const;                // a request may change it
    bool can_have(const pcd_field & field, double number) const; // and to this value

    common_json      value_of(const pcd_field & field, const llama_pcd_params & p) const;
    llama_pcd_params fields  (const common_json & given, llama_pcd_params base) const;
    llama_pcd_params preset  (const std::string & name, const std::string & given = "") const; // given: for an error, what has it in it

    // What a text means, as in Python (pypcd/settings/config.py): "unsure", "window:relative_top=0.1", "beta=1.5"; nothing: off. What
    // it does not name is as in its preset, or as in the paper.
    std::optional<llama_pcd_params> text(const std::string & given) const;

    std::string typed(const llama_pcd_params & p) const; // the other way round, in the fewest values

    std::vector<std::string> own_names() const;
    std::vector<std::string> suffixes () const; // what may stand behind a colon of the model's name
};

// the hint ' (did you mean "x"?)' with the name nearest to a misspelt one; empty if none is near
std::string server_pcd_near(const std::string & name, const std::vector<std::string> & names);

// why "<model>:<end>" is refused
std::string server_pcd_wrong_name(const std::string & name, const std::string & model, const std::vector<std::string> & suffixes);

extern server_pcd_settings server_pcd;
