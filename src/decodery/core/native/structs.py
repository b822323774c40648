"""The structures that native calls take, as `csrc` declares them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p


class LinearStruct(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p), ("scale", c_void_p), ("bias", c_void_p), ("inputs", c_int32), ("outputs", c_int32),
        ("form", c_int32), ("order", c_void_p),
    ]  # fmt: skip


class LayerStruct(ctypes.Structure):
    _fields_ = [
        ("qkv", LinearStruct), ("output", LinearStruct), ("gate_up", LinearStruct), ("down", LinearStruct),
        ("attention_norm", c_void_p), ("mlp_norm", c_void_p), ("q_norm", c_void_p), ("k_norm", c_void_p),
        ("post_attention_norm", c_void_p), ("post_mlp_norm", c_void_p), ("window", c_int32), ("rope", c_int32),
        ("sinks", c_void_p), ("tempered", c_int32), ("mixer", c_void_p), ("steps", LinearStruct),
        ("gate", LinearStruct), ("experts", c_void_p), ("latent", c_void_p),
        ("head_dim", c_int32), ("kv_heads", c_int32), ("reads", c_int32), ("v_norm", c_void_p), ("inputs", c_void_p),
        ("scale", c_float), ("mix_in", LinearStruct), ("mix_out", LinearStruct), ("streams", c_void_p),
        ("reach", c_float), ("sparse", c_int32),
    ]  # fmt: skip


class LatentStruct(ctypes.Structure):
    _fields_ = [
        ("up", LinearStruct), ("keys", c_void_p), ("values", c_void_p), ("rank", c_int32), ("turned", c_int32),
        ("plain", c_int32), ("value", c_int32), ("narrow", c_int32), ("eps", c_float),
    ]  # fmt: skip


class TokenInputsStruct(ctypes.Structure):
    _fields_ = [
        ("gate", LinearStruct), ("out", LinearStruct), ("norm", c_void_p), ("at", c_int32), ("stride", c_int32),
    ]  # fmt: skip


class StreamsStruct(ctypes.Structure):
    _fields_ = [("in", LinearStruct), ("out", POINTER(LinearStruct)), ("count", c_int32), ("active", c_int32)]


class StreamLayerStruct(ctypes.Structure):
    _fields_ = [
        ("in", LinearStruct), ("out", LinearStruct), ("out_norm", c_void_p), ("norm", c_void_p), ("router", c_void_p),
        ("predict", c_void_p), ("correct", c_void_p), ("scale", c_void_p),
    ]  # fmt: skip


class ExpertsStruct(ctypes.Structure):
    _fields_ = [
        ("router", c_void_p), ("router_bias", c_void_p), ("choice_bias", c_void_p), ("scales", c_void_p),
        ("share", c_void_p), ("gate_up", POINTER(LinearStruct)), ("down", POINTER(LinearStruct)), ("count", c_int32),
        ("taken", c_int32), ("groups", c_int32), ("taken_groups", c_int32), ("group_best", c_int32),
        ("sigmoid", c_int32), ("normed", c_int32), ("scaled_inputs", c_int32), ("nothing", c_double),
        ("scale", c_double), ("router_norm", c_void_p), ("enter_norm", c_void_p), ("leave_norm", c_void_p),
        ("mlp_leave_norm", c_void_p),
    ]  # fmt: skip


class ModelStruct(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(LayerStruct)), ("norm", c_void_p), ("head", LinearStruct), ("hidden", c_int32),
        ("intermediate", c_int32), ("heads", c_int32), ("kv_heads", c_int32), ("head_dim", c_int32),
        ("opening", c_int32), ("eps", c_float), ("attention_scale", c_float), ("residual_scale", c_float),
        ("wide_norms", c_int32), ("late_norms", c_int32), ("attention_cap", c_float), ("logit_cap", c_float),
        ("streams", c_void_p),
    ]  # fmt: skip


class PageRowsStruct(ctypes.Structure):
    _fields_ = [
        ("base", c_void_p), ("tables", c_void_p), ("slots", c_void_p), ("rows", c_void_p), ("page_bytes", c_int64),
        ("row_bytes", c_int64), ("count", c_int64), ("start", c_int64), ("layers", c_int32), ("heads", c_int32),
        ("table_pages", c_int32), ("number_bytes", c_int32),
    ]  # fmt: skip


class PolicyStruct(ctypes.Structure):
    _fields_ = [
        ("acts", c_void_p), ("widths", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("counts", c_void_p),
        ("channels", c_void_p), ("side_base", c_void_p), ("side_table", c_void_p), ("summarised", c_void_p),
        ("picked", c_void_p), ("paid", c_void_p), ("side_bytes", c_int64), ("sinks", c_int32),
        ("channel_count", c_int32), ("bits", c_int32), ("first", c_int32), ("recent", c_int32), ("known", c_int32),
        ("side_pages", c_int32), ("room", c_int32), ("paid_from", c_int32), ("paid_slots", c_int32),
        ("sealed", c_void_p), ("blocks", c_void_p), ("stored", c_int32), ("group", c_int32), ("block_groups", c_int32),
        ("block_count", c_int32), ("code_bits", c_int32), ("held", c_void_p), ("worths", c_void_p),
        ("added", c_void_p), ("places", c_void_p), ("parents", c_void_p), ("keeps", c_void_p), ("lasts", c_void_p),
        ("evicting", c_int32), ("held_slots", c_int32), ("worth_slots", c_int32), ("firsts", c_int32),
        ("newest", c_int32),
        ("lowered", c_void_p), ("lowered_by", c_float), ("known_limits", c_void_p), ("limits", c_void_p),
        ("targets", c_void_p), ("merged", c_void_p), ("beta", c_double), ("merge_room", c_int32),
        ("threshold", c_int32), ("weighted", c_int32),
    ]  # fmt: skip


class LostStruct(ctypes.Structure):
    _fields_ = [
        ("base", c_void_p), ("tables", c_void_p), ("slots", c_void_p), ("lengths", c_void_p), ("positions", c_void_p),
        ("worths", c_void_p), ("page_bytes", c_int64), ("row_bytes", c_int64), ("positions_layer", c_int64),
        ("worth_slots", c_int64), ("layers", c_int32), ("heads", c_int32), ("table_pages", c_int32),
        ("count", c_int32), ("number_bytes", c_int32), ("merged_count", c_int32), ("targets", c_void_p),
        ("merged", c_void_p),
    ]  # fmt: skip


class SealedGroupsStruct(ctypes.Structure):
    _fields_ = [("codes", c_void_p * 2), ("low", c_void_p * 2), ("step", c_void_p * 2), ("groups", c_int64)]


class SegmentStruct(ctypes.Structure):
    _fields_ = [
        ("base", c_void_p), ("pages", c_void_p), ("lengths", c_void_p), ("slots", c_void_p), ("positions", c_void_p),
        ("mask", c_void_p), ("page_bytes", c_int64), ("table_layer", c_int64), ("table_head", c_int64),
        ("lengths_layer", c_int64), ("lengths_head", c_int64), ("slots_layer", c_int64), ("slots_head", c_int64),
        ("rows", c_int32), ("stays", c_int32), ("element", c_int32), ("table_pages", c_int32), ("starts", c_void_p),
        ("picked", c_void_p), ("weights", c_void_p), ("mass", c_void_p), ("policy", c_void_p),
        ("states", c_void_p), ("after", c_void_p), ("parents", c_void_p), ("known", c_int32), ("keeps", c_int32),
        ("through", c_int32),
    ]  # fmt: skip


class PassStruct(ctypes.Structure):
    _fields_ = [
        ("hidden", c_void_p), ("segments", POINTER(SegmentStruct)), ("run", c_void_p), ("marks", c_void_p),
        ("taps", c_void_p), ("cos", c_void_p * 2), ("sin", c_void_p * 2), ("rows", c_int32), ("segment_count", c_int32),
        ("run_count", c_int32), ("next", c_int32), ("stopped", c_int32), ("memory", c_void_p), ("queries", c_void_p),
        ("context", c_void_p), ("branch", c_void_p), ("tempers", c_void_p), ("took", c_void_p), ("free", c_void_p),
        ("inputs", c_void_p),
    ]  # fmt: skip


class DraftStruct(ctypes.Structure):
    _fields_ = [
        ("model", ModelStruct), ("enter", LinearStruct), ("token_norm", c_void_p), ("feature_norm", c_void_p),
        ("taps", c_int32), ("norm_first", c_int32),
    ]  # fmt: skip


class GuessStruct(ctypes.Structure):
    _fields_ = [
        ("passed", PassStruct), ("given", c_void_p), ("embedded", c_void_p), ("cos", c_void_p), ("sin", c_void_p),
        ("features", c_void_p), ("logits", c_void_p), ("vocabulary", c_void_p), ("said", c_void_p),
        ("ids", c_void_p), ("chances", c_void_p), ("entering", c_int32), ("narrow", c_int32), ("spoken", c_int32),
        ("k", c_int32),
    ]  # fmt: skip


class MixerStruct(ctypes.Structure):
    _fields_ = [
        ("conv", c_void_p), ("conv_bias", c_void_p), ("step_bias", c_void_p), ("decay", c_void_p), ("skip", c_void_p),
        ("gate_norm", c_void_p), ("heads", c_int32), ("head_dim", c_int32), ("groups", c_int32), ("state", c_int32),
        ("kernel", c_int32), ("least_step", c_float), ("most_step", c_float), ("eps", c_float), ("rule", c_int32),
        ("in_turns", c_int32), ("slot_count", c_int32), ("slots", c_void_p), ("state_at", c_int64),
        ("select_in", c_void_p), ("select_out", c_void_p), ("select_norm", c_void_p), ("rank", c_int32),
        ("step_eps", c_float),
    ]  # fmt: skip


class MixedStruct(ctypes.Structure):
    _fields_ = [
        ("held", c_void_p), ("parents", c_void_p), ("state", c_void_p), ("after", c_void_p), ("gate", c_void_p),
        ("out", c_void_p), ("gate_stride", c_int64), ("reach", c_int32), ("rows", c_int32), ("said", c_int32),
    ]  # fmt: skip


class ExpectedStruct(ctypes.Structure):
    _fields_ = [
        ("keys", c_void_p * 3), ("rows", c_void_p * 3), ("rates", c_void_p), ("rated", c_void_p),
        ("hits", c_void_p * 2), ("tried", c_void_p * 2), ("text", c_void_p), ("past", c_void_p), ("ends", c_void_p),
        ("copied", c_void_p), ("noise", c_double), ("noise_mean", c_double), ("seed", c_uint64), ("position", c_int64),
        ("last", c_int64 * 3), ("width", c_int32), ("known", c_int32), ("ends_count", c_int32),
        ("copied_count", c_int32), ("repeated", c_int32), ("others", c_int32), ("asked", c_int32),
    ]  # fmt: skip


class ProposedStruct(ctypes.Structure):
    _fields_ = [
        ("texts", c_void_p), ("limits", c_void_p), ("depths", c_void_p), ("places", c_void_p), ("costs", c_void_p),
        ("own", c_void_p), ("weights", c_void_p), ("tokens", c_void_p), ("parents", c_void_p), ("sizes", c_void_p),
        ("ends", c_void_p), ("next", c_void_p), ("given", c_double), ("promised", c_double), ("count", c_int32),
        ("cost_count", c_int32), ("stride", c_int32), ("nodes", c_int32),
    ]  # fmt: skip


class DraftingStruct(ctypes.Structure):
    _fields_ = [
        ("step", ProposedStruct), ("prices", c_void_p), ("costs", c_void_p), ("kept", c_void_p),
        ("promised", c_void_p), ("leads", c_void_p), ("weights", c_void_p), ("remembered", c_double),
        ("balance", c_double), ("share", c_double), ("look", c_double), ("ahead", c_double), ("exposed", c_double),
        ("margin", c_double), ("sequences", c_int32), ("nodes", c_int32), ("resting", c_int32), ("noted", c_int32),
        ("fruitless", c_int32), ("silent", c_int32), ("rests", c_int32), ("longest", c_int32), ("patience", c_int32),
        ("pause", c_int32), ("skipped", c_int32), ("drafted", c_int32),
    ]  # fmt: skip


class HappenedStruct(ctypes.Structure):
    _fields_ = [
        ("emitted", c_void_p), ("tokens", c_void_p), ("parents", c_void_p), ("accepted", c_void_p),
        ("logits", c_void_p), ("count", c_int32), ("rows", c_int32), ("length", c_int32), ("failed", c_int32),
    ]  # fmt: skip


class ProcessorStruct(ctypes.Structure):
    _fields_ = [
        ("ids", c_void_p), ("counts", c_void_p), ("tail", c_void_p), ("biases", c_void_p), ("value", c_double),
        ("shape", c_int32), ("count", c_int32), ("tail_count", c_int32),
    ]  # fmt: skip


class SamplingStruct(ctypes.Structure):
    _fields_ = [
        ("logits", c_void_p), ("tokens", c_void_p), ("parents", c_void_p), ("first", c_void_p), ("seeds", c_void_p),
        ("positions", c_void_p), ("processors", c_void_p), ("processor_counts", c_void_p), ("greedy", c_void_p),
        ("padding", c_void_p), ("paths", c_void_p), ("accepted", c_void_p), ("chosen", c_void_p), ("texts", c_int32),
        ("vocab", c_int32), ("limit", c_int32), ("padding_count", c_int32), ("waiting", c_int32),
    ]  # fmt: skip


class ArrayStepStruct(ctypes.Structure):
    _fields_ = [
        ("passed", PassStruct), ("sampling", SamplingStruct), ("last", c_void_p), ("next", c_void_p),
        ("positions", c_void_p), ("ends", c_void_p), ("depths", c_void_p), ("sizes", c_void_p), ("drafts", c_void_p),
        ("emitted", c_void_p), ("kept", c_void_p), ("choices", c_void_p), ("choice_counts", c_void_p),
        ("masks", c_void_p), ("table", c_void_p), ("cos", c_void_p * 2), ("sin", c_void_p * 2), ("scale", c_float),
        ("numbers", c_int32), ("blocks", c_int32), ("room", c_int32), ("stride", c_int32), ("full", c_int32),
        ("plain", c_int32), ("reach", c_int64),
    ]  # fmt: skip


class PricesStruct(ctypes.Structure):
    _fields_ = [
        ("factors", c_void_p), ("weights", c_void_p), ("counts", c_void_p), ("curves", c_void_p),
        ("outliers", c_void_p), ("made", c_void_p), ("read", c_double), ("row", c_double), ("token", c_double),
        ("row_token", c_double), ("text", c_double), ("machine", c_double), ("gain", c_double), ("steps", c_int64),
    ]  # fmt: skip
