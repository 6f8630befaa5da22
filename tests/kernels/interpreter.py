"""Triton's interpreter in a process of its own, repaired for bfloat16.

TRITON_INTERPRET must be set before Triton is imported, and another test of the same pytest process may have imported
it. So kernels run in a worker: `Interpreter` starts this file as a script and sends it calls to evaluate.
"""

import os
import pickle
import subprocess
import sys
import traceback
from importlib import import_module
from typing import Any, BinaryIO

import numpy as np


class Interpreter:
    """`call("package.module:function", ...)` evaluates in the worker. Files of this folder import by bare name."""

    def __init__(self, *options: str):
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, *options]
        self._worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)

    def call(self, target: str, *args: Any, **kwargs: Any) -> Any:
        """Raises RuntimeError with the worker's traceback if the function raises."""
        _send(self._worker.stdin, (target, args, kwargs))
        ok, value = pickle.load(self._worker.stdout)
        if not ok:
            raise RuntimeError(value)
        return value

    def close(self) -> None:
        self._worker.stdin.close()
        self._worker.wait(timeout=30)


def _send(stream: BinaryIO, value: Any) -> None:
    pickle.dump(value, stream)
    stream.flush()


def repair() -> None:
    """Make bfloat16 right in what our kernels use. Triton 3.9 keeps it as uint16 and adds, multiplies and multiplies
    matrices of those integers; float32 to bfloat16 truncates instead of rounding to nearest even."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def is_bfloat16(handle: TensorHandle) -> bool:
        return handle.dtype.scalar == tl.bfloat16

    def widen(handle: TensorHandle) -> TensorHandle:
        return TensorHandle(_to_float32(handle.data), tl.float32) if is_bfloat16(handle) else handle

    def narrow(handle: TensorHandle) -> TensorHandle:
        return TensorHandle(_to_bfloat16(handle.data), tl.bfloat16)

    stock_cast, stock_binary = InterpreterBuilder.cast_impl, InterpreterBuilder.binary_op
    stock_dot, stock_float_cast = InterpreterBuilder.create_dot, InterpreterBuilder.create_fp_to_fp

    def cast(self, source, to):
        if to.scalar == tl.bfloat16 and not is_bfloat16(source):
            return narrow(stock_cast(self, source, tl.float32))
        source = widen(source) if to.scalar != tl.bfloat16 else source
        return source if source.dtype.scalar == to.scalar else stock_cast(self, source, to)

    def float_cast(self, source, to, rounding):
        if tl.bfloat16 in (source.dtype.scalar, to.scalar):
            return cast(self, source, to)
        return stock_float_cast(self, source, to, rounding)

    def binary(self, left, right, op):
        if not (is_bfloat16(left) and is_bfloat16(right)):
            return stock_binary(self, left, right, op)
        result = op(widen(left).data, widen(right).data)
        is_bool = result.dtype == np.bool_
        return TensorHandle(result, tl.int1) if is_bool else narrow(TensorHandle(result, tl.float32))

    def dot(self, a, b, total, precision, imprecise):
        return stock_dot(self, widen(a), widen(b), total, precision, imprecise)

    InterpreterBuilder.cast_impl = cast
    InterpreterBuilder.create_fp_to_fp = float_cast
    InterpreterBuilder.binary_op = binary
    InterpreterBuilder.create_dot = dot


def _to_float32(bits: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(bits).astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even, as uint16."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def serve() -> None:
    """Evaluate calls from standard input until it closes. What a call prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            target, args, kwargs = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            module, name = target.split(":")
            _send(answers, (True, getattr(import_module(module), name)(*args, **kwargs)))
        except Exception:
            _send(answers, (False, traceback.format_exc()))


if __name__ == "__main__":
    if "--stock" not in sys.argv:
        repair()
    serve()
