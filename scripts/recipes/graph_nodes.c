// Preloaded into a process (scripts/recipes/graph_nodes.py): writes each graph that llama.cpp computes as a line of JSON, and lets our
// code take the CPU's caches for a device's. Knows nothing of PCD but the beginning of its functions' names.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include "ggml-backend.h"
#include "ggml.h"

#define EXPORT __attribute__((visibility("default")))

static FILE * out;

EXPORT int graph_nodes_to(const char * path) {
    if (out) {
        fclose(out);
    }
    out = path ? fopen(path, "w") : NULL;
    return !path || out;
}

// ggml is loaded without making its functions known to others, so the next definition has to be asked of the library itself
static void * in_ggml(const char * name) {
    void * library = dlopen("libggml-base.so.0", RTLD_NOW | RTLD_NOLOAD);
    if (!library) {
        library = dlopen("libggml-base.so", RTLD_NOW | RTLD_NOLOAD);
    }
    return library ? dlsym(library, name) : NULL;
}

#define IN_GGML(f) ((__typeof__(&f)) in_ggml(#f))

static void write_tensor(const struct ggml_tensor * t, const char * op, const char * type) {
    fprintf(out, "{\"op\":\"%s\",\"name\":\"%s\",\"type\":\"%s\",\"flags\":%d,\"ne\":[%ld,%ld,%ld,%ld],\"nb\":[%zu,%zu,%zu,%zu],\"offset\":%zu",
            op, t->name, type, (int) t->flags, (long) t->ne[0], (long) t->ne[1], (long) t->ne[2], (long) t->ne[3],
            t->nb[0], t->nb[1], t->nb[2], t->nb[3], t->view_src ? t->view_offs : 0);
}

EXPORT enum ggml_status ggml_backend_sched_graph_compute_async(ggml_backend_sched_t sched, struct ggml_cgraph * graph) {
    if (out) {
        const char * (*op_desc)(const struct ggml_tensor *) = IN_GGML(ggml_op_desc);
        const char * (*type_name)(enum ggml_type)           = IN_GGML(ggml_type_name);
        int (*n_nodes)(struct ggml_cgraph *)                = IN_GGML(ggml_graph_n_nodes);
        struct ggml_tensor * (*node)(struct ggml_cgraph *, int) = IN_GGML(ggml_graph_node);

        fprintf(out, "[");
        for (int i = 0; i < n_nodes(graph); ++i) {
            const struct ggml_tensor * t = node(graph, i);
            fprintf(out, i ? "," : "");
            write_tensor(t, op_desc(t), type_name(t->type));
            fprintf(out, ",\"params\":[");
            for (size_t j = 0; j < sizeof(t->op_params)/sizeof(t->op_params[0]); ++j) {
                fprintf(out, j ? ",%d" : "%d", (int) t->op_params[j]);
            }
            fprintf(out, "],\"src\":[");
            for (int j = 0, n = 0; j < GGML_MAX_SRC; ++j) {
                if (t->src[j]) {
                    fprintf(out, n++ ? "," : "");
                    write_tensor(t->src[j], op_desc(t->src[j]), type_name(t->src[j]->type));
                    fprintf(out, "}");
                }
            }
            fprintf(out, "]}");
        }
        fprintf(out, "]\n");
    }
    return IN_GGML(ggml_backend_sched_graph_compute_async)(sched, graph);
}

// Where caches lie in a device's own memory our graphs differ a little; all else has to know the truth.
EXPORT bool ggml_backend_buffer_is_host(ggml_backend_buffer_t buffer) {
    Dl_info caller;
    if (dladdr(__builtin_return_address(0), &caller) && caller.dli_sname && strstr(caller.dli_sname, "llama_pcd")) {
        return false;
    }
    return IN_GGML(ggml_backend_buffer_is_host)(buffer);
}
