// The passages of an answer: which segments of its documents the end of its prompt attends to most. Knows sequences, tokens and attention
// weights, but nothing of slots.

#include "server-pcd-documents.h"

#include "server-pcd-settings.h"

#include "common.h"
#include "llama-pcd-extras.h"
#include "llama-pcd.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <set>
#include <stdexcept>

using json = common_json;

void server_pcd_passages::begin(
        const server_pcd_replay_ptr & replay, int32_t n_prompt, bool several, bool given_goes_back, bool is_marked) {
    *this = {};
    goes_back = given_goes_back;
    if (!replay) {
        return;
    }
    has_documents = true;
    left_out      = replay->left_out;
    if (replay->prompt.empty()) {
        return;
    }
    if (several) {
        left_out = "the request asks for several answers (n)";
    } else if (!goes_back && !is_marked) {
        left_out = "this model's state cannot go back, so its prompt would be read twice";
    } else {
        waiting = n_prompt > server_pcd.replay.n_last + 1;
    }
}

int32_t server_pcd_passages::n_before(int32_t n_prompt) const {
    return waiting ? n_prompt - server_pcd.replay.n_last : n_prompt;
}

void server_pcd_passages::count(uint64_t & n_cached, uint64_t & n_processed) {
    if (!again) {
        n_cached_first = n_cached;
        return;
    }
    const uint64_t n = n_cached;
    n_cached    = std::min(n, n_cached_first);
    n_processed = n - n_cached;
}

void server_pcd_passages::to_json(json & timings) const {
    if (!has_documents) {
        return;
    }
    timings["passages"] = texts;
    if (!left_out.empty()) {
        timings["passages_left_out"] = left_out;
    }
}

//
// attention
//

namespace {

// the tokens of a segment
struct span {
    const std::string * text;
    int32_t first;
    int32_t last; // one past
    double  most = 0.0; // that any head of any layer pays to it from any of the last tokens
};

struct reading {
    llama_context * ctx;
    llama_seq_id    id;
    int32_t         n; // tokens of the prompt
    std::vector<span> spans;

    bool has_weights = false;

    std::vector<int32_t> cells = {};
};

}

static void look(ggml_tensor * tensor, const float * data, void * user_data) {
    auto & cur = *(reading *) user_data;

    const int64_t * ne    = tensor->ne;
    const char    * layer = strrchr(tensor->name, '-');
    cur.cells.assign(cur.n, -1);
    if (!layer || llama_pcd_get_cells(cur.ctx, atoi(layer + 1), cur.id, cur.cells.data(), cur.n) < cur.n) {
        return; // a cache that dropped some
    }
    cur.has_weights = true;
    for (int64_t row = 0; row < ne[1]*ne[2]*ne[3]; ++row) {
        const float * weights = data + row*ne[0];
        for (auto & span : cur.spans) {
            double sum = 0.0;
            for (int32_t i = span.first; i < span.last; ++i) {
                sum += weights[cur.cells[i]];
            }
            span.most = std::max(span.most, sum);
        }
    }
}

// evaluates tokens at positions n_past .. once, for their attention, and takes them out again; an error in a sentence, or none
static std::string evaluate(
        reading & cur, const std::vector<llama_token> & tokens, int32_t n_past, const std::function<bool()> & make_room) {
    char err[512] = "";
    const char * prefix = "kq_soft_max";
    if (llama_pcd_set_tap(cur.ctx, &prefix, 1, look, &cur, err, sizeof(err)) != LLAMA_PCD_OK) {
        return err;
    }
    llama_pcd_suspend(cur.ctx, true);

    llama_batch batch = llama_batch_init((int32_t) tokens.size(), 0, 1);
    for (size_t i = 0; i < tokens.size(); ++i) {
        batch.token   [i]    = tokens[i];
        batch.pos     [i]    = n_past + (llama_pos) i;
        batch.n_seq_id[i]    = 1;
        batch.seq_id  [i][0] = cur.id;
        batch.logits  [i]    = i + 1 == tokens.size();
    }
    batch.n_tokens = (int32_t) tokens.size();
    int32_t status = 0;
    do {
        status = llama_decode(cur.ctx, batch);
    } while (status == 1 && make_room());
    llama_synchronize(cur.ctx);
    llama_batch_free(batch);

    llama_pcd_suspend(cur.ctx, false);
    llama_pcd_set_tap(cur.ctx, nullptr, 0, nullptr, nullptr, nullptr, 0);
    llama_memory_seq_rm(llama_get_memory(cur.ctx), cur.id, n_past, -1);

    if (status != 0) {
        return status == 1 ? "the context has no room for them" : string_format("llama_decode returned %d", status);
    }
    return cur.has_weights ? "" : "this model has no attention weights to choose them by";
}

// the tokens of each document's segments; a token across a border counts for both
static bool find_spans(
        const llama_vocab * vocab, const server_pcd_replay & replay, const std::vector<llama_token> & prompt, std::vector<span> & res) {
    const server_pcd_places places(vocab, prompt, replay.documents);
    if (!places.has_all()) {
        return false;
    }
    for (size_t i = 0; i < replay.documents.size(); ++i) {
        const auto & document = replay.documents[i];
        size_t at = places.begins[i];
        for (const auto & segment : document.segments) {
            const size_t last = at + segment.size();
            res.push_back({ &segment, places.token_at(at), places.token_at(std::max(last, at + 1) - 1) + 1 });
            at = last + document.joiner.size();
        }
    }
    return true;
}

std::vector<llama_token> server_pcd_passages::choose(
        llama_context * ctx, llama_seq_id id, const server_pcd_replay & replay, const std::vector<llama_token> & prompt, int32_t n_ctx,
        const std::function<bool()> & make_room) {
    auto res = find(ctx, id, replay, prompt, n_ctx, make_room);

    waiting = false;
    if (res.empty() && !goes_back) {
        res = prompt; // what was evaluated for its attention is still in the state
    }
    again = !res.empty();
    return res;
}

std::vector<llama_token> server_pcd_passages::find(
        llama_context * ctx, llama_seq_id id, const server_pcd_replay & replay, const std::vector<llama_token> & prompt, int32_t n_ctx,
        const std::function<bool()> & make_room) {
    const llama_vocab * vocab = llama_model_get_vocab(llama_get_model(ctx));
    const auto & numbers = server_pcd.replay;
    const int32_t n_past = n_before((int32_t) prompt.size());

    reading cur = { ctx, id, (int32_t) prompt.size(), {} };
    if (!find_spans(vocab, replay, prompt, cur.spans)) {
        left_out = "this model's tokenizer changes the text, so that they cannot be found in it";
        return {};
    }
    left_out = evaluate(cur, { prompt.begin() + n_past, prompt.end() }, n_past, make_room);
    if (!left_out.empty()) {
        return {};
    }
    std::vector<size_t> order(cur.spans.size());
    for (size_t i = 0; i < order.size(); ++i) {
        order[i] = i;
    }
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return cur.spans[a].most > cur.spans[b].most; });

    std::vector<size_t> best;
    std::set<std::string> seen;
    bool    are_all = true; // that the documents have
    int32_t left    = numbers.n_tokens;
    for (const size_t i : order) {
        if (!seen.insert(*cur.spans[i].text).second) { // of a document that is there twice
            continue;
        }
        left -= (int32_t) common_tokenize(vocab, *cur.spans[i].text, false, false).size();
        if ((int32_t) best.size() == numbers.n || (!best.empty() && left < 0)) {
            are_all = false;
            break;
        }
        best.push_back(i);
    }
    if (are_all) { // small models take a text that stands there twice for a pattern to go on with
        return {};
    }
    std::sort(best.begin(), best.end());
    for (const size_t i : best) {
        texts.push_back(*cur.spans[i].text);
    }

    std::string again_text = numbers.text;
    string_replace_all(again_text, "{passages}", string_join(texts, "\n\n"));
    std::string text = replay.prompt;
    text.replace(text.find(replay.mark), replay.mark.size() + 2, again_text); // and the space behind it
    auto res = common_tokenize(vocab, text, true, true);
    if ((int32_t) res.size() >= n_ctx) {
        left_out = "the context has no room for them";
        texts.clear();
        return {};
    }
    return res;
}
