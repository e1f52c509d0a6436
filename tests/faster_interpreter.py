"""Leaves out work of Triton's interpreter that has no effect: two thirds of a small kernel's time.

Promise: kernels run the same functions as without, and compute the same. Written for Triton 3.6 to 3.8; where
an interpreter has none of these parts, nothing changes.
"""

import dataclasses
import functools
import inspect
import math
from typing import Any


def make_interpreter_faster() -> None:
    """Change the interpreter in this process, if Triton is installed."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    _patch_once_a_launch(interpreter)
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options: Any = getattr(builder, "options", None)
    if hasattr(options, "sanitize_overflow") and not getattr(options, "debug", True):
        # Each sum of integers is computed again in 64 bits for an assertion that only `debug` turns on.
        builder.options = dataclasses.replace(options, sanitize_overflow=False)
    _look_up_numpy_types(interpreter)
    core: Any = interpreter.tl.core
    _unwrap_quickly(core)
    _name_types_of_tuples_when_asked(core)
    _keep_shapes(core)
    _compare_the_same_quickly(interpreter)


def _patch_once_a_launch(interpreter: Any) -> None:
    """Without this, each call of a device function patches `triton.language` again, and finds it patched."""
    patch: Any = getattr(interpreter, "_patch_lang", None)
    scope_type: Any = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope_type is None:
        return
    language: Any = interpreter.tl

    @functools.cache
    def modules_that_it_sees(function: Any) -> list[Any]:
        seen = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return [module for module in (language, language.core) if module in seen]

    def patch_once(function: Any) -> Any:
        seen = modules_that_it_sees(function)
        # What patching replaces is marked as built in; what it puts there is not.
        is_patched = seen and not any(language.core.is_builtin(module.load) for module in seen)
        return scope_type() if is_patched else patch(function)

    interpreter._patch_lang = patch_once


def _look_up_numpy_types(interpreter: Any) -> None:
    """Without this, each look-up makes the table first."""
    look_up: Any = getattr(interpreter, "_get_np_dtype", None)
    if look_up is None:
        return
    known: dict[str, Any] = {}

    def np_type(triton_type: Any) -> Any:
        name = triton_type.name
        if name not in known:
            known[name] = look_up(triton_type)
        return known[name]

    interpreter._get_np_dtype = np_type


def _unwrap_quickly(core: Any) -> None:
    """Numbers, types and single constants, nearly all there is to unwrap, are told by their type at once."""
    unwrap: Any = getattr(core, "_unwrap_if_constexpr", None)
    if unwrap is None:
        return
    constexpr = core.constexpr
    plain = {int, float, bool, str, type(None), core.dtype, core.block_type, core.pointer_type}

    def unwrap_quickly(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is constexpr else unwrap(value)

    core._unwrap_if_constexpr = unwrap_quickly


def _name_types_of_tuples_when_asked(core: Any) -> None:
    """Each shape is a tuple, whose type has a name made of its elements' types; hardly anyone asks for it."""
    tuples: Any = getattr(core, "tuple", None)
    type_of: Any = getattr(core, "_type_for_tuple_values", None)
    if type_of is None or list(inspect.signature(tuples.__init__).parameters) != ["self", "args", "type"]:
        return
    init = tuples.__init__

    def init_without_type(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.__dict__["values"] = list(args)
        else:
            init(self, args, type)

    def get_type(self: Any) -> Any:
        found = self.__dict__.get("_type")
        if found is None:
            found = self.__dict__["_type"] = type_of(self.values)
        return found

    def set_type(self: Any, value: Any) -> None:
        self.__dict__["_type"] = value

    tuples.__init__ = init_without_type
    tuples.type = property(get_type, set_type)


def _keep_shapes(core: Any) -> None:
    """Blocks of the same shape share it, and its name; without this, each tensor makes its own twice."""
    block_type, tensor = core.block_type, core.tensor
    wanted = (["self", "element_ty", "shape"], ["self", "handle", "type"])
    if tuple(list(inspect.signature(one.__init__).parameters) for one in (block_type, tensor)) != wanted:
        return
    init_block, constexpr, tuples = block_type.__init__, core.constexpr, core.tuple
    blocks: dict[tuple[int, ...], tuple[Any, int, str]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init_kept_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(size if type(size) is int else core._unwrap_if_constexpr(size) for size in shape)
        found = blocks.get(key) if all(type(size) is int for size in key) else None
        if found is None:
            init_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, str(self.shape)
            return  # what it refuses is not kept
        self.element_ty = element_ty
        self.shape, self.numel, name = found
        self.name = f"<{name}, {element_ty}>"

    def init_kept_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle = handle
        self.type = type
        self.dtype = type.scalar
        key = tuple(type.shape.values) if type.is_block() else ()
        found = shapes.get(key)
        if found is None:
            shape = tuples([constexpr(size) for size in key])
            found = shapes[key] = shape, constexpr(math.prod(key))
        self.shape, self.numel = found

    block_type.__init__ = init_kept_block
    tensor.__init__ = init_kept_tensor


def _compare_the_same_quickly(interpreter: Any) -> None:
    """A type is equal to itself, and blocks of the same shape (`_keep_shapes`) need no broadcast."""
    dtype: Any = interpreter.tl.core.dtype
    semantic: Any = getattr(interpreter, "TritonSemantic", None)
    equals, broadcast = dtype.__eq__, getattr(semantic, "broadcast_impl_value", None)
    if broadcast is None:
        return

    def equals_quickly(self: Any, other: Any) -> bool:
        return self is other or equals(self, other)

    def broadcast_quickly(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    dtype.__eq__ = equals_quickly
    semantic.broadcast_impl_value = broadcast_quickly
