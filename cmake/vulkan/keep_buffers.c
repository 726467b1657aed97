// For tests on Mesa's software driver: no buffer is destroyed. Loaded before libvulkan (LD_PRELOAD), by scripts/test.
//
// A descriptor set may go on naming a destroyed buffer at places that a shader does not use. ggml has such sets: pipelines with few
// operands take over sets of pipelines with more. Mesa's llvmpipe (22.3, Debian 12) counts a reference to each buffer of a set, used
// or not, and so writes into memory that was freed. That ends a process some time after a context's compute buffers were made anew,
// as they are when PCD is first turned on. Memory is freed as ever; what stays are the buffers' handles, some hundred bytes each.

#include <dlfcn.h>
#include <string.h>

typedef void (*function)(void);
typedef function (*lookup)(void * handle, const char * name);

static void keep(void) {}

static function find(const char * by, void * handle, const char * name) {
    if (strcmp(name, "vkDestroyBuffer") == 0) {
        return keep;
    }
    return ((lookup) dlsym(dlopen("libvulkan.so.1", RTLD_LAZY), by))(handle, name); // it may be loaded out of reach of RTLD_NEXT
}

function vkGetDeviceProcAddr(void * device, const char * name) {
    return find("vkGetDeviceProcAddr", device, name);
}

function vkGetInstanceProcAddr(void * instance, const char * name) {
    return strcmp(name, "vkGetDeviceProcAddr") == 0 ? (function) vkGetDeviceProcAddr : find("vkGetInstanceProcAddr", instance, name);
}
