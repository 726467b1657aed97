// Vulkan's C++ header, with VK_EXT_layer_settings where the installed one is too old to have it (before 1.3.272; Debian 12 has
// 1.3.239). ggml-vulkan.cpp names this extension wherever it is compiled, and uses it only if Vulkan's validation was compiled in.
// scripts/install.py puts this folder in front of the others.

#pragma once

#include_next <vulkan/vulkan.hpp>

#ifndef VK_EXT_layer_settings

#include <cstdint>
#include <vector>

namespace vk {

enum class LayerSettingTypeEXT { eBool32 };

struct LayerSettingEXT {
    const char *        layer;
    const char *        name;
    LayerSettingTypeEXT type;
    uint32_t            n_values;
    const void *        values;
};

// It is passed to the driver's loader, which steps over a structure that it does not know: so its head is that of Vulkan's.
struct LayerSettingsCreateInfoEXT {
    explicit LayerSettingsCreateInfoEXT(const std::vector<LayerSettingEXT> & settings) :
        n_settings(uint32_t(settings.size())), settings(settings.data()) {}

    uint32_t                type       = 1000496000; // VK_STRUCTURE_TYPE_LAYER_SETTINGS_CREATE_INFO_EXT
    const void *            next       = nullptr;
    uint32_t                n_settings = 0;
    const LayerSettingEXT * settings   = nullptr;
};

} // namespace vk

#endif
