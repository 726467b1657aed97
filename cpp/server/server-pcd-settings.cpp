#include "server-pcd-settings.h"

#include "common.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>
#include <stdexcept>

using json = common_json;

server_pcd_settings server_pcd;

static const char * const EXAMPLE = "\"window:relative_top=0.1\"";

static std::string join(const std::vector<std::string> & words) {
    return string_join(words, ", ");
}

// the number that a value stands for
static double number_of(const pcd_field & field, const json & value) {
    std::vector<std::string> allowed;
    for (const auto & [number, text] : field.names) {
        if (text ? value.is_string() && value.get<std::string>() == text : value.is_null()) {
            return number;
        }
        allowed.push_back(text ? json(text).dump_safe() : "null");
    }
    if (!field.is_choice()) {
        const bool is_typed = field.number ? value.is_number() : value.is_number_integer();
        const double number = is_typed ? value.get<double>() : NAN;
        if (field.number ? std::isfinite((float) number) : std::abs(number) <= INT32_MAX) {
            return number;
        }
        allowed.insert(allowed.begin(), field.number ? "a number" : "an integer");
    }
    throw std::invalid_argument(std::string(field.name) + " is " + value.dump_safe() + "; allowed: " + join(allowed));
}

// a setting that `pypcd serve` gave: what differs from the paper's
static llama_pcd_params params_of(const json & given) {
    llama_pcd_params res = llama_pcd_default_params();

    for (const auto & field : pcd_fields) {
        if (given.contains(field.name)) {
            field.put(res, number_of(field, given.at(field.name)));
        }
    }
    return res;
}

// how many letters have to be put in, left out, changed, or swapped with their neighbour
static size_t distance(const std::string & a, const std::string & b) {
    std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
    for (size_t i = 0; i <= a.size(); ++i) {
        for (size_t j = 0; j <= b.size(); ++j) {
            if (i == 0 || j == 0) {
                d[i][j] = i + j;
                continue;
            }
            d[i][j] = std::min({ d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1]) });
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
                d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
            }
        }
    }
    return d[a.size()][b.size()];
}

std::string server_pcd_near(const std::string & name, const std::vector<std::string> & names) {
    std::string near;
    size_t best = name.size() > 40 ? 0 : 1 + name.size()/3; // a longer one is no slip, and would take long to compare
    for (const auto & cur : names) {
        if (const size_t d = best > 0 ? distance(name, cur) : 1; d < best || (d == best && near.empty() && d < cur.size())) {
            near = cur;
            best = d;
        }
    }
    return near.empty() ? "" : " (did you mean " + json(near).dump_safe() + "?)";
}

std::string server_pcd_wrong_name(const std::string & name, const std::string & model, const std::vector<std::string> & suffixes) {
    const auto last = [](const std::string & text) { return text.substr(text.find('-') + 1); }; // the preset

    std::vector<std::string> quoted = { json(model).dump_safe() };
    std::vector<std::string> words;
    for (const auto & cur : suffixes) {
        quoted.push_back(json(model + ":" + cur).dump_safe());
        words.push_back(last(cur));
    }
    std::string near = server_pcd_near(last(name.substr(model.size() + 1)), words);
    string_replace_all(near, "mean \"", near == " (did you mean \"pcd\"?)" ? "mean \"" + model + ":" : "mean \"" + model + ":pcd-");
    return "it is " + json(name).dump_safe() + near + "; allowed: " + join(quoted);
}

void server_pcd_settings::read(const json & all, const llama_context * ctx, const common_params & params) {
    names = params.model_alias;
    const int32_t version = all.at("version").get<int32_t>();
    if (version != llama_pcd_version()) {
        throw std::runtime_error(string_format("it has version %d of the PCD interface, this server has %d", version, llama_pcd_version()));
    }
    json given = all;
    for (const auto & name : names) {
        if (all.contains("models") && all.at("models").contains(name)) {
            for (const auto & [key, value] : all.at("models").at(name).items()) { // what differs
                given[key] = value;
            }
        }
    }
    for (const auto & [key, text] : all.at("sentences").items()) {
        sentences[key] = text.get<std::string>();
    }
    recommended = all.at("recommended").get<std::string>();
    by_default = given.at("default").get<bool>();
    required   = given.at("required").get<bool>();
    setting    = params_of(given.at("setting"));
    paper      = params_of(given.at("presets").at("paper"));

    for (const auto & cur : given.at("contexts")) {
        contexts.push_back(params_of(cur));
    }
    for (const auto & [name, cur] : given.at("presets").items()) {
        presets.emplace_back(name, params_of(cur));
    }
    vocab = llama_model_get_vocab(llama_get_model(ctx));
    n_ctx = (int32_t) llama_n_ctx_seq(ctx);
    if (params.kv_unified_per_slot > 0) {
        n_ctx = std::min(n_ctx, params.kv_unified_per_slot);
    }
    disk = server_pcd_disk(given.at("weights").get<std::string>(), ctx, params);
    is_given = true;
}

bool server_pcd_settings::is_own(const pcd_field & field) const {
    return field.is_own && !(field.is_of_twin && context.cache == LLAMA_PCD_CACHE_SEPARATE); // there second keys follow the twin's view
}

bool server_pcd_settings::can_have(const pcd_field & field, double number) const {
    if (field.is(&llama_pcd_params::perturbation) && is_own(field)) {
        return number == LLAMA_PCD_PERTURBATION_NONE || number == context.perturbation;
    }
    return is_own(field) || (field.integer ? number : (float) number) == field.get(setting);
}

std::vector<std::string> server_pcd_settings::own_names() const {
    std::vector<std::string> res;
    for (const auto & field : pcd_fields) {
        if (is_own(field)) {
            res.push_back(field.name);
        }
    }
    return res;
}

std::vector<std::string> server_pcd_settings::suffixes() const {
    std::vector<std::string> res;
    if (std::find(runs.begin(), runs.end(), recommended) != runs.end()) {
        res.push_back("pcd");
    }
    res.push_back("pcd-off");
    for (const auto & name : runs) {
        res.push_back("pcd-" + name);
    }
    return res;
}

json server_pcd_settings::value_of(const pcd_field & field, const llama_pcd_params & p) const {
    if (field.number) {
        return json(std::stod(string_format("%.7g", p.*field.number))); // 0.1, not 0.10000000149
    }
    for (const auto & [number, text] : field.names) {
        if (number == p.*field.integer) {
            return text ? json(text) : json(nullptr);
        }
    }
    return json(p.*field.integer);
}

llama_pcd_params server_pcd_settings::fields(const json & given, llama_pcd_params base) const {
    for (const auto & [name, value] : given.items()) {
        const auto field = std::find_if(pcd_fields.begin(), pcd_fields.end(), [&n = name](const auto & cur) { return cur.name == n; });
        if (field == pcd_fields.end()) {
            throw std::invalid_argument("there is no field " + json(name).dump_safe() + server_pcd_near(name, own_names()) +
                    "; a request may change " + join(own_names()));
        }
        const double number = number_of(*field, value);
        if (!can_have(*field, number)) {
            const bool is_perturbation = field->is(&llama_pcd_params::perturbation);
            throw std::invalid_argument(name + " is " + value.dump_safe() + ", this server's is " +
                    value_of(*field, is_perturbation ? context : setting).dump_safe() + ", which only `pypcd serve --pcd` can change; "
                    "a request may change " + join(own_names()));
        }
        field->put(base, number);
    }
    return base;
}

llama_pcd_params server_pcd_settings::preset(const std::string & name, const std::string & given) const {
    if (std::find(runs.begin(), runs.end(), name) == runs.end()) {
        std::vector<std::string> words = { "on", "off" };
        words.insert(words.end(), runs.begin(), runs.end());

        std::vector<std::string> allowed = { "true", "false" };
        for (const auto & cur : words) {
            allowed.push_back("\"" + cur + "\"");
        }
        const bool is_preset = std::any_of(presets.begin(), presets.end(), [&](const auto & cur) { return cur.first == name; });
        throw std::invalid_argument("it is " + json(given.empty() ? name : given).dump_safe() +
                (is_preset ? ", a preset that only `pypcd serve --pcd` can put in force" : server_pcd_near(name, words)) +
                "; allowed: " + join(allowed) + ", an object with any of " + join(own_names()) + ", or these in a text such as " + EXAMPLE);
    }
    return std::find_if(presets.begin(), presets.end(), [&](const auto & cur) { return cur.first == name; })->second;
}

static std::string lower(std::string text) {
    std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return (char) std::tolower(c); });
    return text;
}

static bool can_be_none(const std::string & name) {
    return std::any_of(pcd_fields.begin(), pcd_fields.end(), [&](const auto & field) {
        return field.name == name && field.is_optional();
    });
}

// a value as it is typed: a number if it reads as one
static json literal(const std::string & text, bool can_be_null) {
    const std::string word = lower(text);
    if (can_be_null && (word == "none" || word == "off")) {
        return json(nullptr);
    }
    const bool is_whole = text.find_first_not_of("0123456789", text[0] == '-' || text[0] == '+') == std::string::npos;
    const bool is_plain = word.find_first_not_of("0123456789.e+-") == std::string::npos; // "inf" is a word

    char * end = nullptr;
    const double number = std::strtod(text.c_str(), &end);
    if (!is_plain || *end != '\0' || !std::isfinite(number)) {
        return json(text);
    }
    return is_whole && std::abs(number) < 1e15 ? json((int64_t) number) : json(number);
}

std::optional<llama_pcd_params> server_pcd_settings::text(const std::string & given) const {
    const std::string words = string_strip(given);

    llama_pcd_params base = paper;

    json values_given = json::object();
    for (size_t start = 0, end = 0; end != std::string::npos; start = end + 1) {
        end = words.find(':', start);

        const std::string word  = words.substr(start, end == std::string::npos ? end : end - start);
        const size_t      equal = word.find('=');

        if (start == 0 && equal == std::string::npos) {
            const std::string first = lower(word);
            if (first == "off" && end == std::string::npos) {
                return std::nullopt;
            }
            base = preset(first == "on" ? recommended : first, given);
            continue;
        }
        const std::string name = word.substr(0, equal);
        if (equal == std::string::npos || name.empty() || equal + 1 == word.size() || word.find_first_of(", \t\r\n") != std::string::npos) {
            throw std::invalid_argument("it is " + json(given).dump_safe() + ", and " + json(word).dump_safe() + " in it is no value; "
                    "allowed: name=value, joined by colons, such as " + EXAMPLE);
        }
        if (values_given.contains(name)) {
            throw std::invalid_argument("it is " + json(given).dump_safe() + ", where " + name + " is given twice; give it once");
        }
        values_given[name] = literal(word.substr(equal + 1), can_be_none(name));
    }
    return fields(values_given, base);
}

// a value as Python writes it
static std::string written(const pcd_field & field, const json & value) {
    if (value.is_null() || value.is_string()) {
        return value.is_null() ? "None" : value.get<std::string>();
    }
    const std::string text = field.number ? string_format("%.7g", value.get<double>()) : value.dump_safe();
    return field.number && text.find_first_not_of("-0123456789") == std::string::npos ? text + ".0" : text;
}

std::string server_pcd_settings::typed(const llama_pcd_params & p) const {
    std::string res;
    std::pair<bool, size_t> least = { true, SIZE_MAX };

    for (const auto & [name, preset] : presets) {
        std::vector<std::string> words = { name };
        bool is_other = false; // another kind of twin: its preset would mislead
        for (const auto & field : pcd_fields) {
            if (field.get(p) != field.get(preset)) {
                words.push_back(std::string(field.name) + "=" + written(field, value_of(field, p)));
                is_other |= field.is(&llama_pcd_params::perturbation);
            }
        }
        if (const auto cur = std::make_pair(is_other, words.size()); cur < least) {
            least = cur;
            res   = string_join(words, ":");
        }
    }
    return res;
}
