// Two ways, one of which is cheaper: each is tried, then the cheaper one is taken. The other one is tried again now and then, as often
// as a fixed share of the time pays for: so all trials together cost no more than that share.
//
// The first step after a change of ways does not count: its graph, and what it reads, are no longer in the CPU's caches, and it takes
// up to a fifth longer than those that follow it. So a trial is two steps.

#include "decode/auto.h"

#include <algorithm>
#include <cmath>
#include <tuple>

static constexpr int64_t N_FIRST   = 2;     // steps of each way that count at first
static constexpr double  N_TRIAL   = 2.0;   // steps of a later trial, of which the second one counts
static constexpr int64_t N_BETWEEN = 8;     // steps from one later trial to the next, at least
static constexpr double  SHARE     = 0.01;  // of the time that later trials may cost
static constexpr double  N_SPARE   = 2.0;   // steps that may be set aside for them; it starts so, for an early second thought
static constexpr double  TWIN_MAX  = 1.5;   // a twin by itself takes no more than a step and a half: the rest is a disturbance
static constexpr int64_t N_MEAN    = 48;    // steps that the share of needed twins is a mean of, about
static constexpr int64_t N_PRIOR   = 8;     // what a former text counts for, in steps

//
// one kind of step
//

void llama_pcd_cost::add(double seconds, int64_t step) {
    if (n_latest > 0 && step - last > STALE) {
        latest[0] = get();
        n_latest  = 1;
    }
    if (n_latest == N_LATEST) {
        std::copy(latest.begin() + 1, latest.end(), latest.begin());
        n_latest--;
    }
    latest[n_latest++] = seconds;

    last = step;
    n++;
}

double llama_pcd_cost::get() const {
    if (n_latest == 0) {
        return 0.0;
    }
    auto       sorted = latest;
    const auto third  = sorted.begin() + (n_latest - 1)/3;
    std::nth_element(sorted.begin(), third, sorted.begin() + n_latest);
    return *third;
}

//
// the choice
//

bool llama_pcd_auto::shape::tried() const {
    return std::min(fused.n, plain.n) >= N_FIRST;
}

llama_pcd_auto::key llama_pcd_auto::key_of(size_t n_tokens, size_t n_rows) {
    const auto bucket = [](size_t n) { return n <= 2 ? (int) n : (int) std::ceil(std::log2((double) n)) + 1; };
    return { bucket(n_tokens), bucket(n_rows) };
}

double llama_pcd_auto::alternate_cost(const shape & cur, size_t n_rows) const {
    const double plain = cur.plain.get();
    const double twin  = cur.twin.n > 0 ? std::min(cur.twin.get(), TWIN_MAX*plain) : plain/n_rows; // none yet: as the rows themselves

    return plain + p_needed*n_rows*twin;
}

bool llama_pcd_auto::fuses(size_t n_tokens, size_t n_rows) const {
    const auto it = known[now].shapes.find(key_of(n_tokens, n_rows));
    if (it == known[now].shapes.end()) {
        return true;
    }
    const shape & cur = it->second;

    if (cur.goes_on && !cur.counted) {
        return cur.last_fused;
    }
    if (!cur.tried()) {
        return cur.fused.n < N_FIRST;
    }

    const double fused     = cur.fused.get();
    const double alternate = alternate_cost(cur, n_rows);

    const bool   best  = fused <= alternate;
    const double extra = std::min(std::abs(alternate - fused), std::min(alternate, fused)); // no way takes twice the other's time

    const int64_t n_since = n_steps - (best ? cur.plain : cur.fused).last;

    return n_since >= N_BETWEEN && cur.spare >= N_TRIAL*extra ? !best : best;
}

void llama_pcd_auto::took(const step & cur) {
    shape & s = known[now].shapes[key_of(cur.n_tokens, cur.n_rows)];

    if (s.tried()) {
        const double fused     = s.fused.get();
        const double alternate = alternate_cost(s, cur.n_rows);

        s.spare += SHARE*std::min(fused, alternate);
        if (cur.fused != (fused <= alternate)) {
            s.spare -= std::abs(alternate - fused);
        }
    }

    s.counted    = s.goes_on && cur.fused == s.last_fused;
    s.goes_on    = true;
    s.last_fused = cur.fused;

    known[now].last = ++n_steps;
    if (s.counted) {
        (cur.fused ? s.fused : s.plain).add(cur.first, n_steps);
    }
    if (s.counted && !cur.fused && cur.n_needed > 0) {
        s.twin.add(cur.twins/cur.n_needed, n_steps);
    }

    const double best = std::min(s.fused.get(), alternate_cost(s, cur.n_rows));
    s.spare = s.tried() ? std::clamp(s.spare, 0.0, N_SPARE*best) : N_SPARE*best;

    n_needed = std::min(n_needed + 1, N_MEAN);
    p_needed += ((double) cur.n_needed/cur.n_rows - p_needed)/n_needed;
}

void llama_pcd_auto::follow(const llama_pcd_params & p) {
    const auto costs_of = [](const llama_pcd_params & x) {
        return std::tie(x.cache, x.perturbation, x.type_k_over, x.window, x.n_sink);
    };
    const auto rows = [](const llama_pcd_params & x) {
        return std::tie(x.gamma, x.relative_top, x.min_entropy, x.min_first_entropy);
    };
    const llama_pcd_params former = known[now].params;

    if (costs_of(p) != costs_of(former)) {
        now = std::find_if(known.begin(), known.end(), [&](const costs & cur) {
            return costs_of(cur.params) == costs_of(p);
        }) - known.begin();

        if (now == known.size() && known.size() == N_SETTINGS) { // in the place of the one that is unused for longest
            now = std::min_element(known.begin(), known.end(), [](const costs & a, const costs & b) {
                return a.last < b.last;
            }) - known.begin();
            known[now] = {};
        }
        known.resize(std::max(known.size(), now + 1));

        for (auto & [key, cur] : known[now].shapes) {
            cur.goes_on = false;
        }
    }
    if (rows(p) != rows(former)) {
        n_needed = 0;
    }
    known[now].params = p;
}

void llama_pcd_auto::read_prompt() {
    n_needed = std::min(n_needed, N_PRIOR);
}
