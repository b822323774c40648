"""A GGUF file's matrices in another type of blocks, for the quality of that type alone.

    python benchmarks/requantize.py smollm2 Q5_0 DIR/smollm2-q5_0.gguf

Types: those that the package `gguf` can write and this package reads in place: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
from gguf import GGMLQuantizationType as Kind

from decodery.models.loaders.package_index import pull

KINDS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def requantize(source: Path, kind: Kind, out: Path) -> None:
    """All matrices get this type; vectors and what the file says of the model and its tokens stay as they are."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(str(out), architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim > 1:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a file, or the embedded model's name")
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    source = Path(given.model) if given.model.endswith(".gguf") else Path(pull(given.model))
    requantize(source, Kind[given.kind], given.out)


if __name__ == "__main__":
    main()
