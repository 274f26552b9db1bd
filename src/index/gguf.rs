//! The GGUF header reader.
