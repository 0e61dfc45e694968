"""State of JAX: restored to its devices, compared before anything changes, refused with its place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    """In a process of its own, with two devices of the host."""
    import jax
    import numpy as np
    import pytest
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import nostall
    from nostall.errors import UsageError

    mesh = Mesh(np.array(jax.devices()), ("data",))
    assert jax.device_count() == 2
    split = NamedSharding(mesh, PartitionSpec("data"))

    def state_of(step: int) -> dict[str, object]:
        weights = jax.device_put(np.full((4, 3), step, np.float32), split)
        return {
            "layers": {"weights": weights, "bias": jax.numpy.full(3, step, "bfloat16")},
            "leaves": [jax.numpy.full(2, step)],
            "step": step,
        }

    with nostall.Checkpointer(durable=folder / "jax") as ckpt:
        ckpt.save(state_of(1), 1, level="durable")
        state = state_of(0)
        layers = state["layers"]
        assert ckpt.restore(into=state)
        assert state["layers"] is layers and isinstance(layers, dict)
        assert layers["weights"].sharding == split and layers["weights"].committed
        assert not layers["bias"].committed and layers["bias"].dtype == "bfloat16"
        for one, expected in zip(jax.tree.leaves(state), jax.tree.leaves(state_of(1)), strict=True):
            assert type(one) is type(expected)
            assert np.array_equal(one, expected)
        smaller = state_of(0)
        smaller["leaves"] = [jax.numpy.zeros(3, int)]
        with pytest.raises(UsageError, match=r"state\['leaves'\]\[0\] is of shape \(3,\) and type"):
            ckpt.restore(into=smaller)
        assert smaller["step"] == 0
        with pytest.raises(
            UsageError, match=r"state\['key'\] is a random key of JAX: save jax\.ran"
        ):
            ckpt.save({"key": jax.random.key(0)}, 2)

    exchange(folder)
    keep_types(folder)


def keep_types(folder: Path) -> None:
    """Types of which NumPy itself knows the size alone, with all their values."""
    import ml_dtypes
    import numpy as np
    import torch

    import nostall

    values = np.arange(256, dtype=np.uint8).reshape(2, 128)
    small = ("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float8_e4m3fn", "float8_e5m2")
    state: dict[str, Any] = {name: values.view(getattr(ml_dtypes, name)) for name in small}
    state["int4"] = np.arange(-8, 8).astype(ml_dtypes.int4)
    state["void"], state["text"] = values.view("V2"), np.array(["a", "bc"])
    with nostall.Checkpointer(durable=folder / "types") as ckpt:
        ckpt.save(state, 1, level="durable")
        restored = ckpt.restore()
        assert restored is not None
        found = restored.state
        for name, array in state.items():
            assert found[name].dtype == array.dtype and found[name].tobytes() == array.tobytes()
        tensor = torch.zeros(2, 128, dtype=torch.float8_e4m3fnuz)
        assert ckpt.restore(into={**state, "float8_e4m3fnuz": tensor})
        assert bytes(tensor.view(torch.uint8).numpy()) == values.tobytes()


def exchange(folder: Path) -> None:
    """Arrays of torch, JAX and NumPy take each other's place, also of a type that torch alone knows."""
    import jax
    import ml_dtypes
    import numpy as np
    import torch

    import nostall

    def of_each(array: Any, dtype: str) -> dict[str, Any]:
        tensor = torch.full(array.shape, bool(np.any(array)), dtype=getattr(torch, dtype))
        return {"torch": tensor, "jax": jax.numpy.asarray(array), "numpy": np.array(array)}

    for dtype in ("bfloat16", "float32", "complex64", "bool", "int8"):
        for shape in ((), (3,), (2, 0), (2, 3)):
            ones = np.ones(shape, getattr(ml_dtypes, dtype, dtype))
            state, at = of_each(ones, dtype), folder / dtype / str(shape)
            for i, turn in enumerate((("jax", "numpy", "torch"), ("numpy", "torch", "jax"))):
                with nostall.Checkpointer(durable=at / str(i)) as ckpt:
                    other = {kind: state[of] for kind, of in zip(state, turn, strict=True)}
                    ckpt.save(other, 1, level="durable")
                    into = of_each(np.zeros_like(ones), dtype)
                    assert ckpt.restore(into=into)
                for kind, wanted in of_each(ones, dtype).items():
                    one = into[kind]
                    assert (type(one), one.dtype) == (type(wanted), wanted.dtype)
                    assert tuple(one.shape) == shape and bool((one == wanted).all())


def test_arrays_of_jax_are_restored_to_their_devices(tmp_path: Path) -> None:
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    done = subprocess.run(
        [sys.executable, __file__, tmp_path],
        capture_output=True,
        text=True,
        env={**os.environ, **flags},
    )
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]))
