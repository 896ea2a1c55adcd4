"""The files of a dump, without TensorFlow: their layout, their checksums, and how they are read."""
