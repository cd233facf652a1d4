"""`headwater convert`: a GGUF file as a safetensors checkpoint, which every engine loads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def convert(
    gguf: Annotated[str, typer.Argument(metavar="GGUF", help="GGUF file, or a catalog name (smollm2).")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory to write the checkpoint to.")],
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: float32, bfloat16 or float16.")] = "float32",
    force: Annotated[bool, typer.Option("--force", help="Replace the checkpoint that DIR holds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")] = False,
) -> None:
    """Convert a GGUF model to a Hugging Face checkpoint.

    Writes config, tokenizer and safetensors.
    """
    from headwater.cli.engine_options import needs_extra
    from headwater.cli.output import plural, print_json, progress
    from headwater.models.catalog import find_in_catalog
    from headwater.stores.url import format_size

    with needs_extra():
        from headwater.models.convert import convert_gguf

    source = find_in_catalog(gguf) or Path(gguf)
    with progress("converting") as advance:
        made = convert_gguf(source, directory, dtype=dtype, force=force, progress=advance)
    if as_json:
        print_json(
            {
                "path": str(made.path),
                "dtype": made.dtype,
                "tensors": made.num_tensors,
                "bytes": made.num_bytes,
                "files": made.num_files,
            }
        )
    else:
        size, files = format_size(made.num_bytes), plural(made.num_files, "file")
        print(f"{made.path}: {plural(made.num_tensors, 'tensor')} in {made.dtype}, {size} in {files}")
