"""The tables of experts of a packed file, as src/pack/FORMAT.md has them."""

import struct
import zlib
from collections import namedtuple

import gguf_mini

Part = namedtuple("Part", "part type n_dims position columns rows")
Row = namedtuple("Row", "offset bytes type crc32")  # offset from the tensor's first byte
HEAD, PART, ROW = 24, struct.Struct("<IIIIQQ"), struct.Struct("<QQII")


class Table:
    """Of one layer."""

    def __init__(self, path, holder):
        self.path, self.offset = path, holder.offset
        with open(path, "rb") as file:
            file.seek(holder.offset)
            self.head = file.read(HEAD)
            n_parts, n_expert = struct.unpack_from("<II", self.head, 12)
            self.parts = [Part(*PART.unpack(file.read(PART.size))) for _ in range(n_parts)]
            # expert 0's matrices, expert 1's, and so on
            self.rows = [Row(*ROW.unpack(file.read(ROW.size))) for _ in range(n_parts * n_expert)]

    def write(self):
        """With a checksum that says it is right."""
        table = self.head + b"".join(PART.pack(*p) for p in self.parts) + b"".join(ROW.pack(*r) for r in self.rows)
        with open(self.path, "r+b") as file:
            file.seek(self.offset)
            file.write(table + struct.pack("<I", zlib.crc32(table)))


def tables(path):
    """{name of the tensor: its table}"""
    return {t.name: Table(path, t) for t in gguf_mini.Header(path).tensors if t.name.endswith(".les_experts")}
