//! The committed header is what the exported functions say.
#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

#[test]
fn the_header_is_current() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(root.join("include/cbindgen.toml")).unwrap();
    let mut made = Vec::new();
    cbindgen::Builder::new()
        .with_src(root.join("src/ffi/mod.rs"))
        .with_config(config)
        .generate()
        .unwrap()
        .write(&mut made);
    let made = String::from_utf8(made).unwrap();
    // "# Safety" is Rust's word for what the parameters' descriptions say already
    let made = made.replace("//\n// # Safety\n", "//\n");
    let path = root.join("include/les.h");
    if std::env::var_os("LES_UPDATE_HEADER").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let committed = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(committed == made, "include/les.h is not current: run LES_UPDATE_HEADER=1 cargo test --test header");
}
