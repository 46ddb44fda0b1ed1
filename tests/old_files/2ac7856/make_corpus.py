"""Write corpus.bin, 3000 tokens of a made-up language of 32 words, and corpus.json beside it. Needs
NumPy only."""

import json
from pathlib import Path

import numpy

FOLLOWS = numpy.array([(7 * word + 3) % 31 for word in range(32)])


def main() -> None:
    generator, words = numpy.random.Generator(numpy.random.PCG64(0)), [1]
    for surprise, word in zip(
        generator.random(2999) < 0.2, generator.integers(0, 31, 2999), strict=True
    ):
        words.append(int(word) if surprise else int(FOLLOWS[words[-1]]))
    Path("corpus.bin").write_bytes(numpy.array(words, "<u2").tobytes())
    about = {"dtype": "uint16", "tokens": len(words), "vocab_size": 32, "document_separator": 31}
    Path("corpus.json").write_text(json.dumps(about) + "\n")


if __name__ == "__main__":
    main()
