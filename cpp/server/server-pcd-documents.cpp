#include "server-pcd-documents.h"

#include "server-pcd-settings.h"

#include "common.h"
#include "llama-pcd.h"
#include "log.h"
#include "server-queue.h"
#include "server-schema.h"
#include "subproc.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <future>
#include <mutex>
#include <stdexcept>

using json = common_json;
using reply_fn = std::function<json(const json & call)>;

static constexpr int    SECONDS = 60; // that a request's documents may take, and each time that a slot has looked at them
static constexpr size_t N_MOST  = 2;  // workers that work; one more for a setting, which would wait long behind documents

static const char * const TIMEOUT = "Timeout ("; // how Python's faulthandler begins

static std::mutex mutex_idle;
static std::condition_variable one_is_idle;
static size_t n_workers = 0; // those that wait for a slot are not counted

static thread_local const std::function<bool()> * client_is_gone = nullptr; // of the request that this thread reads

//
// workers
//

// a worker begins or ends, or begins or ends to wait for a slot
static void count_workers(int n) {
    std::lock_guard<std::mutex> lock(mutex_idle);
    n_workers += n;
    one_is_idle.notify_all();
}

// what a worker calls for
static json reply_to(const json & call, const reply_fn & own) {
    const llama_vocab * vocab = server_pcd.vocab;
    if (call.contains("tokenize")) {
        const json & given = call.at("tokenize");
        return json(common_tokenize(vocab, given.at(0).get<std::string>(), given.at(1).get<bool>(), given.at(2).get<bool>()));
    }
    if (call.contains("pieces")) {
        json res = json::array();
        for (const auto & cur : call.at("pieces")) {
            const llama_token token = cur.get<llama_token>();
            const std::string piece = common_token_to_piece(vocab, token, false);
            const bool is_defined = llama_vocab_get_attr(vocab, token) & LLAMA_TOKEN_ATTR_USER_DEFINED;
            res.push_back(json::array({
                std::vector<unsigned char>(piece.begin(), piece.end()), llama_vocab_get_text(vocab, token), is_defined,
            }));
        }
        return res;
    }
    if (!call.contains("attention")) {
        return own(call);
    }
    struct waiting {
        waiting()  { count_workers(-1); }
        ~waiting() { count_workers(1); }
    } at_end;
    return own(call);
}

namespace {

struct ended_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// a process of pypcd/server/worker.py, for one request at a time
class worker {
public:
    worker() {
        const char * python = std::getenv("PYPCD_PYTHON");
        if (!python || !*python) {
            throw std::invalid_argument("documents and values of settings need a server that `pypcd serve` started");
        }
        const int options = subprocess_option_no_window | subprocess_option_inherit_environment;
        if (!process.create({ python, "-m", "pypcd.server.worker", std::to_string(SECONDS) }, options, {}, std::getenv("PYPCD_ROOT"))) {
            throw std::runtime_error(std::string("documents and settings cannot be read: ") + python + " did not start");
        }
        errors = std::async(std::launch::async, [this]() { // which keep it waiting if nobody reads them and their pipe is full
            std::string said;
            for (char line[1 << 12]; fgets(line, sizeof(line), process.stderr_file()); ) {
                said = string_starts_with(said, TIMEOUT) ? said : line;
            }
            return string_strip(said);
        });
    }

    ~worker() {
        process.terminate();
        errors = {};
        process.join();
    }

    bool is_there() { return !is_broken && process.alive(); }

    // the answer to a request. Throws std::invalid_argument if the client is to blame.
    json ask(const json & request, const reply_fn & own) {
        is_broken = true; // until its last word is here
        std::exception_ptr error; // of this process: the worker's sentence is of no use then
        const json res = talk(request, own, error);
        is_broken = res.is_null();
        if (error) {
            std::rethrow_exception(error);
        }
        if (is_broken) {
            const std::string said = errors.get();
            if (string_starts_with(said, TIMEOUT)) {
                throw std::invalid_argument(string_format("the documents took more than %d seconds to read; send them as texts", SECONDS));
            }
            throw ended_error("documents and settings cannot be read: " +
                    (said.empty() ? "the program that reads them ended" : said));
        }
        if (res.contains("fault")) {
            throw std::runtime_error("documents and settings cannot be read: " + res.at("fault").get<std::string>());
        }
        if (res.contains("error")) {
            throw std::invalid_argument(res.at("error").get<std::string>());
        }
        for (const auto & line : res.at("log")) {
            LOG_ERR("%s: %s\n", __func__, line.get<std::string>().c_str());
        }
        return res.at("answer");
    }

private:
    common_subproc process;
    bool is_broken = false;
    std::future<std::string> errors; // the last one that it told

    // its last word on a request, null if it has ended; error: of a reply
    json talk(const json & request, const reply_fn & own, std::exception_ptr & error) {
        json message = request;
        while (write(message)) {
            const json res = read();
            if (res.is_null() || res.contains("answer") || res.contains("error") || res.contains("fault")) {
                return res;
            }
            try {
                message = json { { "reply", reply_to(res, own) } };
            } catch (...) {
                error   = std::current_exception();
                message = json { { "error", "" } };
            }
        }
        return json(nullptr);
    }

    bool write(const json & message) {
        const std::string line = message.dump_safe() + "\n";
        return fwrite(line.data(), 1, line.size(), process.stdin_file()) == line.size() && fflush(process.stdin_file()) == 0;
    }

    json read() { // null: it has ended
        std::string line;
        char buffer[1 << 16];
        while ((line.empty() || line.back() != '\n') && fgets(buffer, sizeof(buffer), process.stdout_file())) {
            line += buffer;
        }
        return line.empty() || line.back() != '\n' ? json(nullptr) : json::parse(line);
    }
};

}

static std::vector<std::unique_ptr<worker>> idle; // the last one has read documents last

static int64_t t_busy = 0; // ms; when one was the last time

int64_t server_pcd_last_busy() {
    std::lock_guard<std::mutex> lock(mutex_idle);
    return n_workers > idle.size() ? ggml_time_ms() : t_busy;
}

json server_pcd_ask_worker(const json & request, const reply_fn & own) {
    std::unique_ptr<worker> cur;
    {
        std::unique_lock<std::mutex> lock(mutex_idle);
        const auto is_free = [&]() { return n_workers - idle.size() < N_MOST + request.contains("setting"); };
        while (!one_is_idle.wait_for(lock, std::chrono::seconds(1), is_free)) {
            if (client_is_gone && (*client_is_gone)()) {
                throw std::runtime_error("the client has gone");
            }
        }
        if (idle.empty()) {
            ++n_workers;
        } else {
            cur = std::move(idle.back());
            idle.pop_back();
        }
    }
    struct give_back {
        std::unique_ptr<worker> & cur;
        ~give_back() {
            std::lock_guard<std::mutex> lock(mutex_idle);
            t_busy = ggml_time_ms();
            if (cur && cur->is_there() && n_workers <= N_MOST) {
                idle.push_back(std::move(cur));
            } else {
                --n_workers;
            }
            one_is_idle.notify_all();
        }
    } at_end { cur };
    if (cur && cur->is_there()) {
        try {
            return cur->ask(request, own);
        } catch (const ended_error &) {} // maybe it was about to, whatever it was asked
    }
    cur = std::make_unique<worker>();
    return cur->ask(request, own);
}

static std::shared_future<void> last; // of what a thread does; after the workers, so that the program does not end before

void server_pcd_later(std::function<void()> what) {
    last = std::async(std::launch::async, [what = std::move(what), before = last]() {
        if (before.valid()) {
            before.wait();
        }
        try {
            what();
        } catch (const std::exception & e) {
            LOG_ERR("%s: %s\n", "server_pcd_later", e.what());
        }
    });
}

//
// what clients send
//

static json take(json & body, const char * name) {
    json res = body.contains(name) ? body.at(name) : json(nullptr);
    body.erase(name);
    return res;
}

static bool has_files(const json & messages) {
    for (const auto & message : messages) {
        if (!message.is_object() || !message.contains("content") || !message.at("content").is_array()) {
            continue;
        }
        for (const auto & part : message.at("content")) {
            if (part.is_object() && part.contains("type") && part.at("type") == json("file")) {
                return true;
            }
        }
    }
    return false;
}

static json model; // what tells it from others

// where a question is looked at
static struct {
    server_queue        * tasks;
    server_response     * results;
    const common_params * params;
    bool has_mtmd;
} slots;

void server_pcd_documents_load(
        const llama_context * ctx, const common_params & params, server_queue & tasks, server_response & results, bool has_mtmd) {
    slots = { &tasks, &results, &params, has_mtmd };
    model = {
        { "path",     std::filesystem::absolute(std::filesystem::u8path(params.model.path)).u8string() }, // a worker runs elsewhere
        { "metadata", json::object() },
    };
    for (const char * key : { "general.architecture", "general.name", "general.size_label" }) {
        char value[256];
        if (llama_model_meta_val_str(llama_get_model(ctx), key, value, sizeof(value)) >= 0) {
            model["metadata"][key] = value;
        }
    }
    const char * own = llama_model_chat_template(llama_get_model(ctx), nullptr);
    model["metadata"]["tokenizer.chat_template"] = !params.chat_template.empty() ? params.chat_template : own ? own : "";
}

static thread_local server_pcd_documents_ptr documents_of_request; // that this thread reads

void server_pcd_client(const std::function<bool()> & is_gone) {
    client_is_gone = &is_gone;
    documents_of_request = nullptr;
}

bool server_pcd_look::read(llama_context * ctx, llama_seq_id id, const std::vector<llama_token> & prompt) {
    char err[512] = "";
    pays.resize(prompt.size());
    const int32_t status = llama_pcd_attention(ctx, id, prompt.data() + n_past, (int32_t) prompt.size() - n_past, n_past, heads.data(),
            (int32_t) heads.size()/2, pays.data(), err, sizeof(err));
    refusal = err;
    return status != LLAMA_PCD_NO_MEMORY;
}

// reads the attention of a question, in a slot as the chat's own
static json look(const json & given, const json & body) {
    if (!slots.params->kv_unified && slots.params->n_parallel > 1) {
        return { { "refusal", "this server keeps the keys of each request apart; start it without --no-kv-unified" } };
    }
    json params = { { "pcd", false }, { "n_predict", 0 } };
    if (body.contains("lora")) {
        params["lora"] = body.at("lora");
    }
    const auto look = std::make_shared<server_pcd_look>();
    look->heads  = given.at("heads").get<std::vector<int32_t>>();
    look->n_past = given.at("n_past").get<int32_t>();
    documents_of_request = std::make_shared<server_pcd_documents>(server_pcd_documents { given, look });

    server_response_reader reader(*slots.tasks, *slots.results, 1);
    server_task task(SERVER_TASK_TYPE_COMPLETION);
    task.id      = reader.get_new_id();
    task.id_slot = json_value(body, "id_slot", -1);
    task.tokens  = server_tokens(given.at("tokens").get<llama_tokens>(), slots.has_mtmd);
    task.params  = server_schema::eval_llama_cmpl_schema(server_pcd.vocab, *slots.params, {}, params);
    reader.post_task(std::move(task));
    const auto res = reader.next(*client_is_gone);
    if (!res) {
        throw std::runtime_error("the client has gone");
    }
    const std::string refusal = res->is_error() ? json_value(res->to_json(), "message", std::string()) : look->refusal;
    return refusal.empty() ? json { { "pays", look->pays } } : json { { "refusal", refusal } };
}

bool server_pcd_chat(json & body, const std::function<json(json &)> & parse, json & res) {
    if (!body.is_object()) {
        return false; // the route itself refuses it
    }
    const json documents = take(body, "documents");
    const json replay    = take(body, "replay");
    const json read      = take(body, "read");

    const bool is_list = body.contains("messages") && body.at("messages").is_array(); // else the route itself refuses it
    const bool is_used = !documents.is_null() || !read.is_null() || !(replay.is_null() || replay.is_boolean());
    if (!is_list || !(is_used || has_files(body.at("messages")))) {
        return false;
    }
    const auto parsed = [&](const json & messages) {
        json plain = body;
        plain["messages"] = messages;
        return parse(plain);
    };
    json answer = server_pcd_ask_worker({
        { "messages",  body.at("messages") },
        { "documents", documents },
        { "replay",    replay },
        { "read",      read },
        { "model",     model },
        { "n_ctx",     server_pcd.n_ctx },
        { "bos",       llama_vocab_bos(server_pcd.vocab) },
        { "disk",      server_pcd.disk },
    }, [&](const json & call) {
        if (call.contains("attention")) {
            return look(call.at("attention"), body);
        }
        res = parsed(call.at("render"));
        return res.at("prompt");
    });
    if (answer.contains("messages")) { // there is more in them than text
        res = parsed(answer.at("messages"));
    } else {
        res["prompt"] = take(answer, "tokens");
    }
    documents_of_request = std::make_shared<server_pcd_documents>(server_pcd_documents { answer, nullptr });
    return true;
}

server_pcd_documents_ptr server_pcd_documents_of(const json & params) {
    for (const char * field : { "documents", "replay", "read" }) {
        if (params.contains(field) && !params.at(field).is_null()) {
            throw std::invalid_argument(std::string("Field '") + field
                    + "': it belongs to chats, such as /v1/chat/completions; leave it out");
        }
    }
    return documents_of_request;
}
