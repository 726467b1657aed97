#include "server-pcd-documents.h"

#include "server-pcd-settings.h"

#include "common.h"
#include "log.h"
#include "subproc.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <list>
#include <mutex>
#include <random>
#include <stdexcept>
#include <thread>

using json = common_json;

static const char * const SPACE = "\n\n"; // between documents and a question, as in Python

static constexpr int    SECONDS  = 60;       // that documents may be read
static constexpr size_t MAX_KEPT = 64 << 20; // bytes of documents that are kept: a conversation sends its documents with each question

std::string server_pcd_document::text() const {
    return string_join(segments, joiner);
}

server_pcd_places::server_pcd_places(
        const llama_vocab * vocab, const std::vector<llama_token> & prompt, const std::vector<server_pcd_document> & documents) {
    std::string text;
    for (const llama_token token : prompt) {
        text += common_token_to_piece(vocab, token, true);
        ends.push_back(text.size());
    }
    size_t behind = 0;
    for (const auto & document : documents) {
        const std::string own = document.text();
        size_t at = text.find(own, behind);
        if (at == std::string::npos) { // the documents of a request's field stand behind files of earlier messages
            at = text.find(own);
        }
        begins.push_back(at);
        behind = at == std::string::npos ? behind : at + own.size();
    }
}

bool server_pcd_places::has_all() const {
    return std::find(begins.begin(), begins.end(), std::string::npos) == begins.end();
}

int32_t server_pcd_places::token_at(size_t byte) const {
    return (int32_t) (std::upper_bound(ends.begin(), ends.end(), byte) - ends.begin());
}

//
// Python
//

// what a program writes to its output, for what is written to its input
static std::string output_of(const std::vector<std::string> & command, const std::string & input) {
    common_subproc process;
    if (!process.create(command, subprocess_option_no_window | subprocess_option_inherit_environment, {}, std::getenv("PYPCD_ROOT"))) {
        throw std::runtime_error("documents cannot be read: " + command[0] + " did not start");
    }
    std::mutex mutex;
    std::condition_variable ended;
    bool is_done = false;
    std::atomic<bool> is_late = false;

    std::thread watch([&]() {
        std::unique_lock<std::mutex> lock(mutex);
        if (!ended.wait_for(lock, std::chrono::seconds(SECONDS), [&]() { return is_done; })) {
            is_late = true;
            process.terminate();
        }
    });
    fwrite(input.data(), 1, input.size(), process.stdin_file()); // it reads all of it before it writes
    process.close_stdin();

    std::string res;
    char buffer[1 << 16];
    for (size_t n; (n = fread(buffer, 1, sizeof(buffer), process.stdout_file())) > 0; ) {
        res.append(buffer, n);
    }
    std::string said;
    for (size_t n; (n = fread(buffer, 1, sizeof(buffer), process.stderr_file())) > 0; ) {
        said.append(buffer, n);
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        is_done = true;
    }
    ended.notify_one();
    watch.join();

    if (is_late) {
        throw std::invalid_argument(string_format("the documents took more than %d seconds to read; send them as texts", SECONDS));
    }
    if (process.join() != 0) {
        said = string_strip(said);
        throw std::runtime_error("documents cannot be read: " + said.substr(said.rfind('\n') + 1));
    }
    return res;
}

// documents that were read, the latest first
static std::mutex mutex_kept;
static std::list<std::pair<std::string, server_pcd_document>> kept;

static bool find_kept(const std::string & key, server_pcd_document & res) {
    std::lock_guard<std::mutex> lock(mutex_kept);
    const auto it = std::find_if(kept.begin(), kept.end(), [&](const auto & cur) { return cur.first == key; });
    if (it == kept.end()) {
        return false;
    }
    res = it->second;
    kept.splice(kept.begin(), kept, it);
    return true;
}

static void keep(const std::string & key, const server_pcd_document & document) {
    std::lock_guard<std::mutex> lock(mutex_kept);
    kept.emplace_front(key, document);

    size_t n_bytes = 0;
    for (auto it = kept.begin(); it != kept.end(); ) {
        n_bytes += it->first.size()*2; // its text may be as long
        it = n_bytes > MAX_KEPT ? kept.erase(it) : std::next(it);
    }
}

// given: of each the name, and "text" or "file_data"
static std::vector<server_pcd_document> read_documents(const std::vector<json> & given) {
    std::vector<server_pcd_document> res(given.size());
    std::vector<size_t> unknown;
    json asked = json::array();
    for (size_t i = 0; i < given.size(); ++i) {
        if (!find_kept(given[i].dump_safe(), res[i])) {
            unknown.push_back(i);
            asked.push_back(given[i]);
        }
    }
    if (unknown.empty()) {
        return res;
    }
    const char * python = std::getenv("PYPCD_PYTHON");
    if (!python || !*python) {
        throw std::invalid_argument("documents need a server that `pypcd serve` started");
    }
    const json told = json::parse(output_of({ python, "-m", "pypcd.document" }, asked.dump_safe()));
    for (size_t k = 0; k < unknown.size(); ++k) {
        const json & cur = told.at(k);
        auto & document = res[unknown[k]];
        if (cur.contains("error")) {
            throw std::invalid_argument(cur.at("error").get<std::string>());
        }
        document.name   = cur.at("name").get<std::string>();
        document.joiner = cur.at("joiner").get<std::string>();
        for (const auto & segment : cur.at("segments")) {
            document.segments.push_back(segment.get<std::string>());
        }
        keep(given[unknown[k]].dump_safe(), document);
    }
    return res;
}

//
// what clients send
//

static std::string text_of(const json & given, const char * name) {
    return given.contains(name) && given.at(name).is_string() ? given.at(name).get<std::string>() : "";
}

// {"filename", "file_data"} of a client as Python takes it
static json file_of(const json & given) {
    if (!given.is_object() || text_of(given, "file_data").empty()) {
        const bool has_id = given.is_object() && (given.contains("file_id") || given.contains("file_url"));
        throw std::invalid_argument(std::string("a file has no file_data") + (has_id ? " but an id or an address" : "") +
                "; allowed: {\"filename\": \"report.pdf\", \"file_data\": the file's bytes in base64, or a data URL with them}; "
                "this server keeps no files and fetches none");
    }
    const std::string data = text_of(given, "file_data");

    std::string name = text_of(given, "filename");
    if (name.empty()) { // its ending says that it is a DOCX
        const bool is_docx = data.rfind("data:", 0) == 0 && data.substr(0, 100).find("wordprocessingml") != std::string::npos;
        name = is_docx ? "document.docx" : "document";
    }
    return json { { "name", name }, { "file_data", data } };
}

// {"name", "text"} of a client
static json plain_of(const json & given) {
    if (!given.is_object() || text_of(given, "text").empty()) {
        throw std::invalid_argument("it has " + given.dump_safe().substr(0, 80)
                + "; allowed: a list of {\"name\": \"report.txt\", \"text\": \"…\"}; "
                "files such as PDF are parts of a message, or POST /documents reads them");
    }
    const std::string name = text_of(given, "name");
    return json { { "name", name.empty() ? "document" : name }, { "text", text_of(given, "text") } };
}

json server_pcd_input_file(const json & part) {
    return json { { "type", "file" }, { "file", part } };
}

json server_pcd_anthropic_file(const json & part) {
    const json        source = part.contains("source") ? part.at("source") : json::object();
    const std::string type   = text_of(source, "type");
    const std::string name   = text_of(part, "title");

    if (type == "text") {
        return json { { "type", "file" }, { "file", { { "name", name }, { "text", text_of(source, "data") } } } };
    }
    if (type != "base64") {
        throw std::invalid_argument("a document's source has type " + json(type).dump_safe()
                + "; allowed: \"text\", \"base64\"; this server fetches no files");
    }
    json file = {
        { "file_data", "data:" + text_of(source, "media_type") + ";base64," + text_of(source, "data") },
    };
    if (!name.empty()) {
        file["filename"] = name;
    }
    return json { { "type", "file" }, { "file", file } };
}

json server_pcd_read_document(const json & body, const std::function<size_t(const std::string &)> & count) {
    const auto document = read_documents({ body.contains("text") ? plain_of(body) : file_of(body) }).at(0);
    const auto text     = document.text();
    return json { { "name", document.name }, { "text", text }, { "n_tokens", count(text) } };
}

//
// a chat
//

// the message's own text; false: there is more than text in it
static bool own_text(const json & content, std::string & res) {
    if (content.is_string() || content.is_null()) {
        res = content.is_null() ? "" : content.get<std::string>();
        return true;
    }
    bool is_text = content.is_array();
    for (size_t i = 0; is_text && i < content.size(); ++i) {
        is_text = text_of(content.at(i), "type") == "text";
        res += (i > 0 ? "\n" : "") + text_of(content.at(i), "text"); // as llama.cpp joins them
    }
    return is_text;
}

static std::string random_mark() {
    std::random_device rd;
    return string_format("replay%08x%08x", rd(), rd());
}

static json take(json & body, const char * name) {
    json res = body.contains(name) ? body.at(name) : json(nullptr);
    body.erase(name);
    return res;
}

// what add_replay() adds is ours: no client knows this
static const std::string & signature() {
    static const std::string res = random_mark() + random_mark();
    return res;
}

server_pcd_chat::server_pcd_chat(json & body) {
    if (!body.is_object()) {
        return; // the route itself refuses it
    }
    const json wanted    = take(body, "replay");
    const json documents = take(body, "documents");
    take(body, "pcd_replay"); // ours alone

    if (!wanted.is_null() && !wanted.is_boolean()) {
        throw std::invalid_argument("Field 'replay': it is " + wanted.dump_safe().substr(0, 80) + "; allowed: true, false");
    }
    if (!body.contains("messages") || !body.at("messages").is_array()) {
        return; // the route itself refuses it
    }
    json & messages = body.at("messages");

    // of each document the message that it belongs to
    std::vector<json>   given;
    std::vector<size_t> owner;

    size_t last_user = messages.size();
    for (size_t i = 0; i < messages.size(); ++i) {
        if (text_of(messages.at(i), "role") == "user") {
            last_user = i;
        }
    }
    const char * field = "documents";
    try {
        if (!documents.is_null()) {
            if (!documents.is_array()) {
                throw std::invalid_argument("it is " + documents.dump_safe().substr(0, 80)
                        + "; allowed: a list of {\"name\": \"report.txt\", \"text\": \"…\"}");
            }
            for (const auto & cur : documents) {
                if (last_user == messages.size()) {
                    throw std::invalid_argument("there is no message of the user that they could stand in front of");
                }
                given.push_back(plain_of(cur));
                owner.push_back(last_user);
            }
        }
        auto found = read_documents(given);
        given.clear();
        field = "file";
        for (size_t i = 0; i < messages.size(); ++i) {
            json & message = messages.at(i);
            if (!message.is_object() || !message.contains("content") || !message.at("content").is_array()) {
                continue;
            }
            json others = json::array();
            for (const auto & part : message.at("content")) {
                if (text_of(part, "type") != "file") {
                    others.push_back(part);
                    continue;
                }
                const json file = part.contains("file") ? part.at("file") : json(nullptr);
                given.push_back(file.is_object() && file.contains("text") ? plain_of(file) : file_of(file));
                owner.push_back(i);
            }
            if (others.size() < message.at("content").size()) {
                message["content"] = others;
            }
        }
        for (auto & document : read_documents(given)) {
            found.push_back(std::move(document));
        }
        if (found.empty()) {
            return;
        }
        replay = std::make_shared<server_pcd_replay>();
        replay->documents = std::move(found);
    } catch (const std::invalid_argument & e) {
        throw std::invalid_argument(std::string("Field '") + field + "': " + e.what());
    }

    // with the first message the first: the order in which passages are told
    const std::string space = SPACE;
    std::string question;     // of the last message
    std::string content;      // of the last message, as text
    bool is_all_text = true;  // all messages are
    for (size_t i = 0; i < messages.size(); ++i) {
        std::string text;
        for (size_t k = 0; k < owner.size(); ++k) {
            if (owner[k] == i) {
                text += (text.empty() ? "" : space) + replay->documents[k].text();
            }
        }
        std::string own;
        const bool is_text = own_text(messages.at(i).contains("content") ? messages.at(i).at("content") : json(""), own);
        if (string_strip(own).empty()) {
            own.clear();
        }
        const std::string whole = text + (text.empty() || own.empty() ? "" : space) + own;
        is_all_text = is_all_text && is_text;
        if (i == last_user) {
            question = own.substr(std::min(own.find_first_not_of('\n'), own.size()));
            content  = whole;
        }
        if (text.empty()) {
            continue;
        }
        if (is_text) {
            messages.at(i)["content"] = whole;
            continue;
        }
        json parts = json::array();
        parts.push_back(json { { "type", "text" }, { "text", text + space } });
        for (const auto & part : messages.at(i).at("content")) {
            parts.push_back(part);
        }
        messages.at(i)["content"] = parts;
    }

    size_t n_segments = 0;
    for (const auto & document : replay->documents) {
        n_segments += document.segments.size();
    }
    if (wanted == json(false) || n_segments < 2 || (is_all_text && question.empty())) {
        return;
    }
    if (!is_all_text || last_user + 1 != messages.size()) {
        replay->left_out = is_all_text ? "the last message is not the user's" : "the messages are not text alone";
        return;
    }
    replay->mark = random_mark();
    content.insert(content.size() - question.size(), replay->mark + space);
    marked = body;
    marked["messages"].at(last_user)["content"] = content;
}

void server_pcd_chat::add_replay(json & params, const std::function<std::string(json &)> & prompt_of) {
    if (!replay) {
        return;
    }
    if (!marked.is_null()) {
        replay->prompt = prompt_of(marked);
        const size_t at = replay->prompt.find(replay->mark);
        if (at == std::string::npos || replay->prompt.find(replay->mark, at + 1) != std::string::npos) {
            replay->prompt.clear();
            replay->left_out = "the model's chat template changes the message, so that no passage can be put into it";
        }
    }
    json documents = json::array();
    for (const auto & cur : replay->documents) {
        documents.push_back(json { { "name", cur.name }, { "segments", cur.segments }, { "joiner", cur.joiner } });
    }
    params["pcd_replay"] = {
        { "signature", signature() },
        { "documents", documents },
        { "prompt",    replay->prompt },
        { "mark",      replay->mark },
        { "left_out",  replay->left_out },
    };
}

server_pcd_replay_ptr server_pcd_replay_of(const json & params) {
    for (const char * field : { "documents", "replay" }) {
        if (params.contains(field) && !params.at(field).is_null()) {
            throw std::invalid_argument(std::string("Field '") + field
                    + "': it belongs to chats, such as /v1/chat/completions; leave it out");
        }
    }
    if (!params.contains("pcd_replay")) {
        return nullptr;
    }
    const json & given = params.at("pcd_replay");
    if (text_of(given, "signature") != signature()) {
        throw std::invalid_argument("Field 'pcd_replay': it is no field of requests; leave it out");
    }

    auto res = std::make_shared<server_pcd_replay>();
    for (const auto & cur : given.at("documents")) {
        server_pcd_document document;
        document.name   = cur.at("name").get<std::string>();
        document.joiner = cur.at("joiner").get<std::string>();
        for (const auto & segment : cur.at("segments")) {
            document.segments.push_back(segment.get<std::string>());
        }
        res->documents.push_back(document);
    }
    res->prompt   = given.at("prompt").get<std::string>();
    res->mark     = given.at("mark").get<std::string>();
    res->left_out = given.at("left_out").get<std::string>();
    return res;
}
