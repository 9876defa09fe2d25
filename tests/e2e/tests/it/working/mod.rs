//! What programs do with files and names, without pause and held against what should come of it. The programs are the test itself,
//! started again where the work is to be done ([`asked`]): in a guest, say, to which it is brought on a disk.
#![allow(dead_code)]

pub mod data;
pub mod names;

use std::path::PathBuf;

use anyhow::{Context, Result};

/// Tells the test that it is to work: what, the seed, how many operations, then the directories, a line each.
pub const WORK: &str = "HEARTH_E2E_WORK";

/// What [`WORK`] asks for.
pub struct Asked {
    pub what: String,
    pub seed: u64,
    pub operations: u64,
    pub places: Vec<PathBuf>,
}

/// What this process was started for, if it was started to work.
pub fn asked() -> Result<Option<Asked>> {
    let Ok(text) = std::env::var(WORK) else {
        return Ok(None);
    };
    let mut words = text.split(' ');
    let mut next = || words.next().context("what, seed, operations, places");
    Ok(Some(Asked {
        what: next()?.to_owned(),
        seed: next()?.parse()?,
        operations: next()?.parse()?,
        places: words.map(PathBuf::from).collect(),
    }))
}

/// FNV-1a: enough to tell a file from another, and nothing to install.
pub fn sum(data: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    data.iter().fold(0xcbf2_9ce4_8422_2325, step)
}
