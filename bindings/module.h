// The rooms' bindings; module.cc calls each once.
#pragma once

#include <nanobind/nanobind.h>

void bind_base(nanobind::module_& m);
void bind_plan(nanobind::module_& m);
void bind_source(nanobind::module_& m);
void bind_composite(nanobind::module_& m);
void bind_records(nanobind::module_& m);
void bind_ranges(nanobind::module_& m);
void bind_tokens(nanobind::module_& m);
void bind_image(nanobind::module_& m);
void bind_peer(nanobind::module_& m);
void bind_fields(nanobind::module_& m);
void bind_stage(nanobind::module_& m);
void bind_tiers(nanobind::module_& m);
void bind_timeline(nanobind::module_& m);
void bind_trace(nanobind::module_& m);
void bind_checkpoint(nanobind::module_& m);
void bind_collective(nanobind::module_& m);
void bind_sync(nanobind::module_& m);
void bind_simulate(nanobind::module_& m);
