//! Changes of a datastore's files, what a model makes of them, and how a client asks for them.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use hearth_nfs::v3::{Args, Create, How, Named, SetAttributes, Status};

use super::nfs::{Client, get, set_size};
use super::{pattern, read};

/// A change of a file.
#[derive(Clone, Copy, Debug)]
pub enum Change {
    Create(&'static str),
    Write(&'static str, u64, usize, u8),
    SetSize(&'static str, u64),
    Rename(&'static str, &'static str),
    Remove(&'static str),
    /// No change: what is on flash only is written back.
    Flush,
}

/// What is in the directory.
pub type Files = BTreeMap<&'static str, Vec<u8>>;

impl Change {
    /// Carries it out in the model.
    pub fn apply(self, files: &mut Files) {
        match self {
            Change::Create(name) => drop(files.insert(name, Vec::new())),
            Change::Write(name, offset, len, round) => {
                let file = files.entry(name).or_default();
                let (from, to) = (offset as usize, offset as usize + len);
                file.resize(file.len().max(to), 0);
                file[from..to].copy_from_slice(&pattern(offset, round, len));
            }
            Change::SetSize(name, size) => files.entry(name).or_default().resize(size as usize, 0),
            Change::Rename(from, to) => {
                if let Some(file) = files.remove(from) {
                    files.insert(to, file);
                }
            }
            Change::Remove(name) => drop(files.remove(name)),
            Change::Flush => {}
        }
    }

    /// Asks for it. An error if the daemon is gone.
    pub fn ask(
        self,
        client: &mut Client,
        dir: &[u8],
        flush: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let named = |name: &'static str| Named {
            dir,
            name: name.as_bytes(),
        };
        let results = match self {
            Change::Create(name) => {
                let set = SetAttributes {
                    mode: Some(0o644),
                    ..SetAttributes::default()
                };
                let at = named(name);
                let what = Create::File(How::Guarded(set));
                client.call(&Args::Create { at, what })?
            }
            Change::Write(name, offset, len, round) => {
                let file = &find(client, dir, name)?.context("a file to write")?;
                client.call(&Args::durable(file, offset, &pattern(offset, round, len)))?
            }
            Change::SetSize(name, size) => {
                let file = &find(client, dir, name)?.context("a file to cut")?;
                set_size(client, file, size)?
            }
            Change::Rename(from, to) => client.call(&Args::Rename {
                from: named(from),
                to: named(to),
            })?,
            Change::Remove(name) => client.call(&Args::Remove(named(name)))?,
            Change::Flush => return flush(),
        };
        results.ok().map(drop)
    }

    /// What may be found if it was not answered: the files as before, as after, and in between.
    pub fn outcomes(self, files: &Files) -> Vec<Files> {
        let mut after = files.clone();
        self.apply(&mut after);
        let mut all = vec![files.clone(), after];
        let mut between = files.clone();
        match self {
            // A cut takes two steps: a file that still has its length may have lost its end.
            Change::SetSize(name, size) => {
                let file = between.entry(name).or_default();
                let from = (size as usize).min(file.len());
                file[from..].fill(0);
                all.push(between);
            }
            // As the length is durable before the data is answered.
            Change::Write(name, offset, len, _) => {
                let file = between.entry(name).or_default();
                file.resize(file.len().max(offset as usize + len), 0);
                all.push(between);
            }
            _ => {}
        }
        all
    }
}

pub fn find(client: &mut Client, dir: &[u8], name: &str) -> Result<Option<Vec<u8>>> {
    let name = name.as_bytes();
    let found = client.call(&Args::Lookup(Named { dir, name }))?;
    if found.is(Status::NoEnt).is_ok() {
        return Ok(None);
    }
    let found = found.ok()?;
    Ok(Some(found.reader().opaque(64)?.to_vec()))
}

/// What clients see of the names that occur.
pub fn seen(client: &mut Client, dir: &[u8]) -> Result<Files> {
    let mut files = Files::new();
    for name in ["a.img", "b.log", "c.img"] {
        if let Some(file) = find(client, dir, name)? {
            let size = get(client, &file)?.size;
            let content = read(client, &file, 0, 1 << 20)?;
            ensure!(content.len() as u64 == size, "{name}: {size}");
            files.insert(name, content);
        }
    }
    Ok(files)
}

/// What is different, in few words.
pub fn sketch(files: &Files) -> String {
    let of = |(name, content): (&&str, &Vec<u8>)| {
        let set = content.iter().filter(|b| **b != 0).count();
        format!("{name}: {} bytes, {set} of them set; ", content.len())
    };
    files.iter().map(of).collect()
}
