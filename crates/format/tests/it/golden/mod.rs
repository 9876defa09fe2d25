//! Golden bytes: what version 1 of the format looks like, to the byte.
//!
//! The expected bytes were computed from `docs/format.md` by a separate program, not by the
//! encoders under test. If one of these tests fails, the format has changed: pools already
//! written would not be read. Raise a version or add a feature flag instead of the constant.

mod beside;
mod log;
mod order;
mod registry;
mod superblock;

use hearth_format::{Uuid, pool_tag};

/// Decodes `lines` of hex and pads with zeros to a block.
fn hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2)
        .map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap())
        .collect()
}

fn block(lines: &[&str]) -> Vec<u8> {
    let mut bytes = hex(&lines.concat());
    bytes.resize(4096, 0);
    bytes
}

fn pool() -> Uuid {
    Uuid::from_bytes(std::array::from_fn(|i| 0x10 + i as u8))
}

fn device() -> Uuid {
    Uuid::from_bytes(std::array::from_fn(|i| 0xa0 + i as u8))
}

#[test]
fn the_pool_tag_is_the_start_of_the_uuid() {
    assert_eq!(pool_tag(&pool()).to_le_bytes(), pool().as_bytes()[..8]);
}
