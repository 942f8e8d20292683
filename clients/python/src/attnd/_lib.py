"""Finds libattn.so and declares its functions and structs to ctypes.

The library is loaded once, by the first call that needs it. ctypes lets other Python threads run
while a C call runs, so a thread that waits for the daemon holds up nobody. The structs here repeat
clients/libattn/attn.h field by field.
"""

from __future__ import annotations

import ctypes
import os
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_float,
    c_int,
    c_int32,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)

SONAME = "libattn.so.0"
MESSAGE_BYTES = 256
ALL_TOKENS = 0xFFFFFFFF


class Error(Structure):
    _fields_ = [
        ("status", c_int32),
        ("reserved", c_uint32),
        ("retry_after_us", c_uint64),
        ("message", c_char * MESSAGE_BYTES),
    ]


class ClientOptions(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("max_retries", c_uint32),
        ("timeout_us", c_uint64),
        ("resume_session", c_uint64),
        ("client_name", c_char_p),
        ("fail_fast", c_uint32),
        ("has_no_keeper", c_uint32),
        ("token_file", c_char_p),
        ("ca_file", c_char_p),
        ("cert_file", c_char_p),
        ("cert_key_file", c_char_p),
    ]


class ClientInfo(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("protocol_version", c_uint32),
        ("session", c_uint64),
        ("lease_us", c_uint64),
        ("max_message_bytes", c_uint64),
        ("max_step_items", c_uint32),
        ("max_step_tokens", c_uint32),
        ("max_seq_tokens", c_uint32),
        ("max_sequences", c_uint32),
        ("server_version", c_char * 64),
        ("backend", c_char * 64),
        ("boot_id", c_uint64),
    ]


class ClientCounters(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("n_in_flight", c_uint32),
        ("n_sent", c_uint64),
        ("n_resent", c_uint64),
        ("n_retried", c_uint64),
        ("n_timed_out", c_uint64),
        ("n_stray", c_uint64),
    ]


class Branch(Structure):
    _fields_ = [("segment_tokens", c_uint32), ("rate", c_uint32)]


class Layer(Structure):
    _fields_ = [
        ("scale", c_float),
        ("window_tokens", c_uint32),
        ("sink_tokens", c_uint32),
        ("soft_cap", c_float),
        ("is_full", c_uint32),
        ("n_branches", c_uint32),
        ("sink_logits", POINTER(c_float)),
        ("alibi_slopes", POINTER(c_float)),
        ("branches", POINTER(Branch)),
    ]


class PoolSpec(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("layer_struct_size", c_uint32),
        ("name", c_char_p),
        ("num_layers", c_uint32),
        ("num_q_heads", c_uint32),
        ("num_kv_heads", c_uint32),
        ("head_dim_k", c_uint32),
        ("head_dim_v", c_uint32),
        ("block_tokens", c_uint32),
        ("n_blocks", c_uint32),
        ("q_dtype", c_int32),
        ("kv_dtype", c_int32),
        ("is_batch_invariant", c_uint32),
        ("n_layers", c_uint32),
        ("split", c_int32),
        ("layers", POINTER(Layer)),
        ("model", c_char_p),
        ("rope", c_char_p),
        ("is_v_in_k", c_uint32),
        ("q_nope_dim", c_uint32),
        ("out_dim", c_uint32),
    ]


class Seq(Structure):
    _fields_ = [("id", c_uint64), ("epoch", c_uint32), ("reserved", c_uint32)]


class Tokens(Structure):
    _fields_ = [
        ("ids", POINTER(c_uint32)),
        ("n", c_uint32),
        ("reserved", c_uint32),
        ("adapter", c_uint64),
    ]


class Probe(Structure):
    _fields_ = [
        ("cached_tokens", c_uint32),
        ("tier_tokens", c_uint32),
        ("n_blocks", c_uint32),
        ("n_free_blocks", c_uint32),
        ("n_reserved_blocks", c_uint32),
    ]


NOTE_BYTES = 4096  # ATTN_NOTE_BYTES


class Place(Structure):
    _fields_ = [("url", c_char * 128), ("id", c_uint64), ("epoch", c_uint32)]


class SeqCall(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("kind", c_int32),
        ("seq", Seq),
        ("new_id", c_uint64),
        ("pos", c_uint32),
        ("len", c_uint32),
        ("tokens", Tokens),
        ("layer_len", POINTER(c_uint32)),
        ("n_cached", c_uint32),
        ("probe", Probe),
        ("error", Error),
    ]


class SeqFile(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("num_layers", c_uint32),
        ("id", c_uint64),
        ("adapter", c_uint64),
        ("bytes", c_uint64),
        ("n_tokens", c_uint32),
        ("n_ids", c_uint32),
        ("n_blocks", c_uint32),
        ("kv_dtype", c_int32),
        ("pool", c_char * 64),
        ("freed_first", c_uint32),
        ("freed_past", c_uint32),
    ]


class Moved(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("is_left", c_uint32),
        ("n_tokens", c_uint32),
        ("n_blocks", c_uint32),
        ("n_blocks_stopped", c_uint32),
        ("reserved", c_uint32),
        ("bytes", c_uint64),
        ("stop_ns", c_uint64),
    ]


class Retention(Structure):
    _fields_ = [
        ("first_token", c_uint32),
        ("priority", c_int32),
        ("time_to_live_s", c_uint32),
        ("is_pinned", c_uint32),
    ]


class Item(Structure):
    _fields_ = [
        ("seq", Seq),
        ("pos", c_uint32),
        ("n_tokens", c_uint32),
    ]


class Part(Structure):
    _fields_ = [
        ("key_base", c_uint32),
        ("n_keys", c_uint32),
    ]


class Step(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("layer", c_uint32),
        ("n_items", c_uint32),
        ("array_dtype", c_int32),
        ("items", POINTER(Item)),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("item_status", POINTER(c_int32)),
        ("timeout_us", c_uint64),
        ("in_place", c_void_p),
        ("parents", POINTER(c_int32)),
        ("is_full", c_uint32),
        ("n_indices", c_uint32),
        ("indices", c_void_p),
        ("index_tokens", c_uint32),
        ("choose_blocks", c_uint32),
        ("parts", POINTER(Part)),
    ]


FILL_CB = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_void_p)
TAKE_CB = CFUNCTYPE(None, c_void_p, c_void_p, c_void_p, c_uint32)


class InPlace(Structure):
    _fields_ = [
        ("is_append", c_bool),
        ("is_attend", c_bool),
        ("has_lse", c_bool),
        ("fill", FILL_CB),
        ("take", TAKE_CB),
        ("user", c_void_p),
    ]


class StepResult(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("status", c_int32),
        ("n_failed", c_uint32),
        ("n_sends", c_uint32),
        ("retry_after_us", c_uint64),
        ("queue_ns", c_uint64),
        ("device_ns", c_uint64),
        ("total_ns", c_uint64),
        ("message", c_char * MESSAGE_BYTES),
    ]


class LaneOptions(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("reserved", c_uint32),
        ("in_bytes", c_uint64),
        ("out_bytes", c_uint64),
        ("wait_us", c_uint64),
    ]


class LaneInfo(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("is_host", c_uint32),
        ("in_bytes", c_uint64),
        ("out_bytes", c_uint64),
        ("in_address", c_void_p),
        ("out_address", c_void_p),
    ]


class Plan(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("n_items", c_uint32),
        ("items", POINTER(Item)),
        ("n_layers", c_uint32),
        ("is_append", c_uint32),
        ("is_attend", c_uint32),
        ("has_lse", c_uint32),
        ("layers", POINTER(c_uint32)),
        ("is_restart", c_uint32),
        ("reserved", c_uint32),
        ("timeout_us", c_uint64),
    ]


class LaneStep(Structure):
    _fields_ = [
        ("struct_size", c_uint32),
        ("n_tokens", c_uint32),
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("lse", c_void_p),
        ("q_stride", c_uint64),
        ("k_stride", c_uint64),
        ("v_stride", c_uint64),
    ]


STEP_CB = CFUNCTYPE(None, c_void_p, c_uint64, POINTER(StepResult))

# name: (result type, argument types)
_FUNCTIONS = {
    "attn_status_name": (c_char_p, [c_int]),
    "attn_status_message": (c_char_p, [c_int]),
    "attn_status_is_retryable": (c_bool, [c_int]),
    "attn_dtype_bytes": (c_size_t, [c_int]),
    "attn_dtype_name": (c_char_p, [c_int]),
    "attn_dtype_parse": (c_int, [c_char_p]),
    "attn_last_error": (POINTER(Error), []),
    "attn_last_error_gone": (c_int, []),
    "attn_version": (c_char_p, []),
    "attn_default_url": (c_char_p, []),
    "attn_client_open": (
        c_int,
        [c_char_p, POINTER(ClientOptions), c_uint64, POINTER(c_void_p)],
    ),
    "attn_client_reopen": (c_int, [c_void_p, c_uint64]),
    "attn_client_close": (None, [c_void_p]),
    "attn_client_give_up": (None, [c_void_p]),
    "attn_client_info": (c_int, [c_void_p, POINTER(ClientInfo)]),
    "attn_client_counters": (c_int, [c_void_p, POINTER(ClientCounters)]),
    "attn_client_pin": (c_int, [c_void_p]),
    "attn_client_ping": (c_int, [c_void_p, c_uint64, POINTER(c_uint64)]),
    "attn_client_stats": (c_int, [c_void_p, c_uint64, POINTER(c_void_p)]),
    "attn_client_drain": (c_int, [c_void_p, c_uint64, c_uint64]),
    "attn_client_fence": (c_int, [c_void_p, c_uint64, c_uint64]),
    "attn_client_retire_seq": (c_int, [c_void_p, c_char_p, c_uint64, c_uint64]),
    "attn_client_kill_seq": (c_int, [c_void_p, c_char_p, c_uint64, c_uint64]),
    "attn_client_reload": (c_int, [c_void_p, c_uint64, POINTER(c_void_p)]),
    "attn_client_inspect": (c_int, [c_void_p, c_char_p, c_uint64, c_uint64, POINTER(c_void_p)]),
    "attn_client_fd": (c_int, [c_void_p]),
    "attn_client_poll": (c_int, [c_void_p, c_uint64, POINTER(c_uint32)]),
    "attn_free": (None, [c_void_p]),
    "attn_pool_create": (c_int, [c_void_p, POINTER(PoolSpec), c_uint64, POINTER(c_void_p)]),
    "attn_pool_describe": (c_int, [c_void_p, c_char_p, c_uint64, POINTER(c_void_p)]),
    "attn_pool_release": (c_int, [c_void_p, c_uint64]),
    "attn_pool_reserve": (c_int, [c_void_p, c_uint32, c_uint64, POINTER(c_uint32)]),
    "attn_pool_set_wire_dtype": (c_int, [c_void_p, c_int32]),
    "attn_pool_resize": (c_int, [c_void_p, c_uint32, c_uint64]),
    "attn_pool_weights": (c_int, [c_void_p, c_uint32, c_void_p, c_uint64]),
    "attn_pool_send_weights": (c_int, [c_void_p, c_uint32, c_uint64]),
    "attn_pool_close": (None, [c_void_p]),
    "attn_pool_spec_of": (POINTER(PoolSpec), [c_void_p]),
    "attn_pool_free_blocks": (c_uint32, [c_void_p]),
    "attn_seq_open": (c_int, [c_void_p, c_uint64, c_uint64, POINTER(Seq)]),
    "attn_seq_open_with": (
        c_int,
        [c_void_p, c_uint64, POINTER(Tokens), c_uint64, POINTER(Seq), POINTER(c_uint32)],
    ),
    "attn_seq_tokens": (
        c_int,
        [c_void_p, POINTER(Seq), c_uint32, POINTER(c_uint32), c_uint32, c_uint64],
    ),
    "attn_seq_retain": (
        c_int,
        [c_void_p, POINTER(Seq), POINTER(Retention), c_uint32, c_uint64],
    ),
    "attn_seq_fork": (
        c_int,
        [c_void_p, POINTER(Seq), c_uint64, c_uint32, c_uint64, POINTER(Seq), POINTER(c_uint32)],
    ),
    "attn_seq_truncate": (c_int, [c_void_p, POINTER(Seq), c_uint32, c_uint64]),
    "attn_seq_commit": (
        c_int,
        [c_void_p, POINTER(Seq), POINTER(c_uint32), c_uint32, c_uint64],
    ),
    "attn_seq_close": (c_int, [c_void_p, POINTER(Seq), c_uint64]),
    "attn_seq_adopt": (c_int, [c_void_p, c_uint64, c_uint64, POINTER(Seq), POINTER(c_uint32)]),
    "attn_seq_probe": (c_int, [c_void_p, POINTER(Tokens), c_uint64, POINTER(Probe)]),
    "attn_seq_calls": (
        c_int,
        [c_void_p, POINTER(SeqCall), c_uint32, c_uint64, POINTER(c_uint32)],
    ),
    "attn_seq_export": (c_int, [c_void_p, c_uint64, c_char_p, c_uint64, POINTER(SeqFile)]),
    "attn_seq_import": (
        c_int,
        [c_void_p, c_char_p, c_uint64, c_uint64, POINTER(Seq), POINTER(c_uint32)],
    ),
    "attn_seq_file_info": (c_int, [c_char_p, POINTER(SeqFile)]),
    "attn_seq_note": (c_int, [c_void_p, POINTER(Seq), c_char_p, c_uint32, c_uint64]),
    "attn_seq_note_get": (c_int, [c_void_p, c_uint64, c_uint64, c_char_p, POINTER(c_uint32)]),
    "attn_seq_locate": (c_int, [c_void_p, c_uint64, c_uint32, c_uint64, POINTER(Place)]),
    "attn_seq_move": (
        c_int,
        [c_void_p, c_uint64, c_void_p, c_uint64, POINTER(Seq), POINTER(Moved)],
    ),
    "attn_step": (c_int, [c_void_p, POINTER(Step), POINTER(StepResult)]),
    "attn_step_start": (
        c_int,
        [c_void_p, POINTER(Step), STEP_CB, c_void_p, POINTER(c_uint64)],
    ),
    "attn_lane_open": (c_int, [c_void_p, c_char_p, POINTER(LaneOptions), POINTER(c_void_p)]),
    "attn_lane_close": (None, [c_void_p]),
    "attn_lane_info": (c_int, [c_void_p, POINTER(LaneInfo)]),
    "attn_lane_plan": (c_int, [c_void_p, c_void_p, POINTER(Plan)]),
    "attn_lane_enqueue": (c_int, [c_void_p, c_void_p, c_void_p, POINTER(LaneStep)]),
    "attn_lane_check": (c_int, [c_void_p]),
    "attn_merge": (
        c_int,
        [c_int32, c_uint32, c_uint64, c_uint32, c_void_p, c_void_p, c_void_p, c_void_p],
    ),
    "attn_step_wait": (c_int, [c_void_p, c_uint64, POINTER(StepResult)]),
}


class LibraryNotFound(ImportError):
    """libattn.so could not be found or loaded; the message lists where it was looked for."""


def _candidates() -> list[str]:
    """Where the library may be, best first; names without a slash are the system's to find."""
    named = os.environ.get("ATTN_LIBRARY")  # ATTND_ variables are the daemon's settings
    if named:
        return [named]  # who names one wants that one
    package = os.path.dirname(os.path.realpath(__file__))
    places = [os.path.join(package, "native/lib", SONAME)]  # a wheel's
    places.append(os.path.normpath(os.path.join(package, "../../..", SONAME)))  # installed by CMake
    root = os.path.normpath(os.path.join(package, "../../../.."))
    if os.path.isfile(os.path.join(root, "clients/libattn/attn.h")):  # a source tree
        places.append(os.path.join(root, "build/lib", SONAME))
    return [p for p in places if os.path.isfile(p)] + [SONAME]


def _declare(lib: ctypes.CDLL) -> None:
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(lib, name)
        function.restype = result
        function.argtypes = arguments


_lib: ctypes.CDLL | None = None


def library() -> ctypes.CDLL:
    """The library, loaded on first use.

    Looked for as $ATTN_LIBRARY (a path, and then nowhere else), inside this package, in the lib/ it
    was installed to or the build folder of its source tree, and where the system keeps libraries.
    """
    global _lib
    if _lib is not None:
        return _lib
    tried = []
    for path in _candidates():
        try:
            lib = ctypes.CDLL(path)
            _declare(lib)
        except (OSError, AttributeError) as e:
            tried.append(f"  {path}: {e}")
            continue
        _lib = lib
        return lib
    raise LibraryNotFound(
        "attnd needs the C library libattn; none of these could be loaded:\n"
        + "\n".join(tried)
        + "\nBuild it (cmake --build build --target attn), install attnd, or set ATTN_LIBRARY to"
        " the path of libattn.so"
    )
