"""The flags of the commands that measure; torch-free, so that the command line can be built from them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """What `minisgl tune` measures and where the table goes."""

    model: str = "llama-3.1-8b"
    """Whose shapes: names of minisgl/benchmark/model_shapes.py or folders with config.json, separated by
    commas; "/tp4" behind a name is one of four ranks; "all" is every model that tables are shipped for."""
    ops: str | None = None
    """Only these ops, separated by commas. Auto: all that have a configuration."""
    device: str = "cuda"
    """Either "cuda" or "cpu"; cpu tries the command out in Triton's interpreter and needs --out."""
    gpu: int = 0
    """Which GPU, by index."""
    out: str | None = None
    """Folder of the table. Auto: the installed package's own, where lookups find it."""
    plot: str | None = None
    """Draw the result to this .png, .svg or .html; needs matplotlib."""
    dry_run: bool = False
    """Show shapes and candidates, measure nothing; needs no GPU."""
    again: bool = False
    """Measure shapes that the table already has (otherwise a run goes on where an earlier one ended)."""


@dataclass(frozen=True, kw_only=True)
class KernelBenchSettings:
    """What `minisgl bench kernel` measures."""

    model: str = "llama-3.1-8b"
    """Whose shapes: names of minisgl/benchmark/model_shapes.py or folders with config.json, separated by
    commas; "/tp4" behind a name is one of four ranks."""
    device: str = "cuda"
    """Either "cuda" or "cpu"; cpu tries the command out in Triton's interpreter on tiny shapes."""
    kernel: tuple[str, ...] = ()
    """Time op=module:function in the op's place (docs/kernels.md)."""
    baselines: bool = True
    """Time plain torch under torch.compile too, and flashinfer where it is installed."""
    out: str | None = None
    """Write the results to this file, as JSON."""
    plot: str | None = None
    """Draw the results to this .png, .svg or .html; needs matplotlib."""
