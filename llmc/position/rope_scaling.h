// position/rope_scaling.h -- rope's base and how rope is stretched (rope.cuh): as --rope_theta and --rope_scaling say
// it, as config.json keeps it by Hugging Face's names, and as log.jsonl names it:
//
//   --rope_theta 500000 --rope_scaling yarn:4
//   "rope_theta": 500000, "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 1024}
#ifndef LLMC_POSITION_ROPE_SCALING_H
#define LLMC_POSITION_ROPE_SCALING_H

#include "../base/json.h"
#include "encoding.cuh"

struct RopeScalingName { RopeScaling scaling; const char *flag, *file; };
constexpr RopeScalingName rope_scaling_names[] = {{RopeScaling::None, "none", "default"},
                                                  {RopeScaling::PI, "pi", "linear"},
                                                  {RopeScaling::NTK, "ntk", "ntk"},
                                                  {RopeScaling::YaRN, "yarn", "yarn"}};

inline const RopeScalingName& rope_scaling_name(RopeScaling scaling) {
    for (const RopeScalingName& n : rope_scaling_names) { if (n.scaling == scaling) { return n; } }
    die(EXIT_BAD_INPUT, "rope_scaling: there is no kind %d", (int)scaling);
}

// "yarn:4": as --rope_scaling has it
inline std::string rope_scaling_text(const PositionConfig& position) {
    const std::string kind = rope_scaling_name(position.scaling).flag;
    return position.scaling_factor > 0 ? kind + strprintf(":%.9g", position.scaling_factor) : kind;
}

// As it is at T tokens. null: rope turns as it did from the start
inline Json rope_scaling_json(const PositionConfig& position, int T) {
    if (position.scaling == RopeScaling::None) { return Json(); }
    return {{"rope_type", rope_scaling_name(position.scaling).file}, {"factor", position.stretch(T)},
            {"original_max_position_embeddings", position.original_length()}};
}

// Sets how `position` is stretched from the "rope_scaling" of a config.json, which may be null.
inline void rope_scaling_from_json(const Json& j, PositionConfig& position, const std::string& what) {
    if (j.is_null()) { return; }
    check(j.is_object(), "%s: rope_scaling: expected an object, got %s", what.c_str(), json_excerpt(j).c_str());
    for (const auto& item : j.items()) {
        const std::string& key = item.key();
        check(key == "rope_type" || key == "type" || key == "factor" || key == "original_max_position_embeddings",
              "%s: rope_scaling: expected rope_type, factor and original_max_position_embeddings, got '%s'",
              what.c_str(), printable(key).c_str());
    }
    const std::string type = json_string(j, j.contains("rope_type") ? "rope_type" : "type", what);
    bool found = false;
    for (const RopeScalingName& n : rope_scaling_names) {
        if (type != n.file) { continue; }
        position.scaling = n.scaling;
        found = true;
    }
    check(found, "%s: rope_scaling: expected rope_type linear, ntk or yarn, got '%s'", what.c_str(),
          printable(type).c_str());
    if (position.scaling == RopeScaling::None) { return; }
    check(position.has("rope"), "%s: rope_scaling: only rope can be stretched, and the encoding is %s", what.c_str(),
          position.name.c_str());
    position.scaling_factor = json_number(j, "factor", what);
    check(position.scaling_factor >= 1, "%s: rope_scaling: expected a factor of at least 1, got %g", what.c_str(),
          position.scaling_factor);
    if (j.contains("original_max_position_embeddings")) {
        position.T_original = (int)json_int(j, "original_max_position_embeddings", 1, INT32_MAX, what);
    }
}

// --rope_scaling ntk:4 -> how, and the factor s (0: T / T_original at each length)
inline void parse_rope_scaling(const std::string& text, PositionConfig& position) {
    const size_t colon = text.find(':');
    const std::string kind = text.substr(0, colon);
    for (const RopeScalingName& n : rope_scaling_names) { if (kind == n.flag) { position.scaling = n.scaling; } }
    position.scaling_factor = colon == std::string::npos ? 0.0 : strtod(text.c_str() + colon + 1, nullptr);
    check(position.scaling == RopeScaling::None || position.has("rope"),
          "--rope_scaling %s: only rope can be stretched, and the encoding is %s", text.c_str(), position.name.c_str());
}

// ----------------------------------------------------------------------------------------------------------
// the base theta. It is one of rope's hyperparameters, which config.json has with the encoding, and once more as
// "rope_theta", where other programs look for it.

// Of all ropes of `position`; 0: there is none, or they have several
inline double rope_theta(const PositionConfig& position) {
    double theta = 0;
    bool same = true;
    position.each([&](const PositionConfig& c) {
        if (c.name != "rope") { return; }
        same = same && (theta == 0 || theta == c.value("theta"));
        theta = c.value("theta");
    });
    return same ? theta : 0;
}

// Gives each rope of `position` the base theta; whether that changed any.
inline bool set_rope_theta(PositionConfig& position, double theta) {
    bool changed = false;
    const auto set = [&](PositionConfig& c) {
        for (Hyperparameter& h : c.values) {
            if (c.name != "rope" || h.key != "theta" || h.value == theta) { continue; }
            h.value = theta;
            changed = true;
        }
    };
    set(position);
    for (PositionConfig& part : position.parts) { set(part); }
    return changed;
}

// The "rope_theta" of a config.json, if any, must be the base that its encoding has.
inline void check_rope_theta(const Json& config, const PositionConfig& position, const std::string& what) {
    const double theta = rope_theta(position);
    if (theta == 0 || !config.contains("rope_theta")) { return; }
    const double found = json_number(config, "rope_theta", what);
    check(found == theta, "%s: rope_theta: expected %.9g, which position has, got %.9g; --rope_theta changes both",
          what.c_str(), theta, found);
}

// What config.json says of rope besides the encoding
inline void set_rope_json(Json& config, const PositionConfig& position, int T) {
    const double theta = rope_theta(position);
    const Json scaling = rope_scaling_json(position, T);
    if (theta > 0) { config["rope_theta"] = theta; }
    if (!scaling.is_null()) { config["rope_scaling"] = scaling; }
}

#endif
