// The fields of a setting as a table, for code that treats them all alike. cmake/fields.py makes it from pypcd/fields.py.

#pragma once

#include "llama-pcd.h"

#include <vector>

// a number with a name; text: nullptr where Python has None
struct pcd_name {
    int32_t      number;
    const char * text;
};

struct pcd_field {
    const char *                name;
    int32_t llama_pcd_params::* integer; // one of the two
    float   llama_pcd_params::* number;
    double                      default_value;

    // the range; is_open: without its lowest number
    double low;
    double high;
    bool   is_open;

    std::vector<pcd_name> names;

    bool is_own;     // a sequence can have another value than its context
    bool is_of_twin; // it makes L*

    double get(const llama_pcd_params & p) const { return integer ? p.*integer : p.*number; }

    void put(llama_pcd_params & p, double value) const {
        if (integer) {
            p.*integer = (int32_t) value;
        } else {
            p.*number = (float) value;
        }
    }

    bool is(int32_t llama_pcd_params::* field) const { return integer == field; }

    // whether its values are names; whether it can be None
    bool is_choice() const { return !names.empty() && names.back().text; }
    bool is_optional() const { return !names.empty() && !names.front().text; }
};

inline const std::vector<pcd_field> pcd_fields = {
#include "llama-pcd-fields.inc"
};
