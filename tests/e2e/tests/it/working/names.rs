//! Random operations on names in directories that several workers share: files, directories and links are made, renamed, linked and
//! removed. Each worker has names of its own among the others', of which it knows what should come of every operation; of the names
//! that all of them use it knows only which errors there may be.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use hearth_rig::rng::Rng;

/// Directories, and names in each.
const DIRS: u64 = 4;
const NAMES: u64 = 6;
/// Names that are disks of the cache, and that are not.
const ENDINGS: [&str; 2] = ["img", "log"];

/// What a name of one's own is.
#[derive(Clone, Debug, PartialEq)]
enum Is {
    /// A file, by its content.
    File(String),
    /// A directory with nothing in it.
    Dir,
    /// A link to this.
    Link(String),
}

struct Work<'a> {
    place: &'a Path,
    worker: u64,
    rng: Rng,
    own: BTreeMap<(u64, String), Is>,
    made: u64,
}

fn dir(n: u64) -> String {
    format!("d{n}")
}

/// Makes the directories in which all work.
pub fn prepare(place: &Path) -> Result<()> {
    for n in 0..DIRS {
        fs::create_dir(place.join(dir(n)))?;
    }
    Ok(())
}

/// What may happen to who uses a name that others use as well.
fn may_be(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(
            libc::ENOENT
                | libc::EEXIST
                | libc::ENOTEMPTY
                | libc::ENOTDIR
                | libc::EISDIR
                | libc::ESTALE
                | libc::EINVAL
                | libc::EPERM
                | libc::ELOOP
        )
    )
}

impl Work<'_> {
    fn at(&self, (in_dir, name): &(u64, String)) -> PathBuf {
        self.place.join(dir(*in_dir)).join(name)
    }

    /// Some name: one's own, or one of everybody's.
    fn name(&mut self, own: bool) -> (u64, String) {
        let (in_dir, n) = (self.rng.below(DIRS), self.rng.below(NAMES));
        let ending = ENDINGS[self.rng.below(2) as usize];
        let whose = if own { self.worker } else { 9 };
        (in_dir, format!("w{whose}-{n}.{ending}"))
    }

    fn own(&mut self) -> Result<()> {
        let (name, to) = (self.name(true), self.name(true));
        let (path, other) = (self.at(&name), self.at(&to));
        let is = self.own.get(&name).cloned();
        let that = self.own.get(&to).cloned();
        let what = format!("{name:?} ({is:?}), {to:?} ({that:?})");
        self.own_one(name, to, &path, &other, is, that)
            .with_context(|| what)
    }

    fn own_one(
        &mut self,
        name: (u64, String),
        to: (u64, String),
        path: &Path,
        other: &Path,
        is: Option<Is>,
        that: Option<Is>,
    ) -> Result<()> {
        let Some(is) = is else {
            self.made += 1;
            let made = match self.rng.below(8) {
                0 => {
                    fs::create_dir(path).context("mkdir")?;
                    Is::Dir
                }
                1 => {
                    let content = format!("to/{}", self.made);
                    symlink(&content, path).context("symlink")?;
                    Is::Link(content)
                }
                _ => {
                    let content = format!("{} {}", self.worker, self.made);
                    let mut options = OpenOptions::new();
                    let new = options.write(true).create_new(true).open(path);
                    new.context("create")?
                        .write_all(content.as_bytes())
                        .context("write")?;
                    Is::File(content)
                }
            };
            self.own.insert(name, made);
            return Ok(());
        };
        match self.rng.below(8) {
            0 | 1 => {
                match is {
                    Is::Dir => fs::remove_dir(path).context("rmdir")?,
                    _ => fs::remove_file(path).context("remove")?,
                }
                self.own.remove(&name);
            }
            2..=4 => {
                let renamed = fs::rename(path, other);
                // A directory does not go over a file, nor the other way round.
                let fits = that
                    .as_ref()
                    .is_none_or(|that| (*that == Is::Dir) == (is == Is::Dir));
                ensure!(renamed.is_ok() == fits, "rename: {renamed:?}");
                // Of two names of one file none goes.
                let same = name != to && self.same(&name, &to);
                if fits && !same {
                    self.own.remove(&name);
                    self.own.insert(to, is);
                }
            }
            5 => {
                let linked = fs::hard_link(path, other);
                let fits = that.is_none() && is != Is::Dir;
                ensure!(linked.is_ok() == fits, "link: {linked:?}");
                if fits {
                    self.own.insert(to, is);
                }
            }
            _ => self.look(&name, &is)?,
        }
        Ok(())
    }

    /// Two names of one file, which no two others have the content of.
    fn same(&self, a: &(u64, String), b: &(u64, String)) -> bool {
        let (a, b) = (self.own.get(a), self.own.get(b));
        a.is_some() && a == b && a != Some(&Is::Dir)
    }

    fn look(&self, name: &(u64, String), is: &Is) -> Result<()> {
        let path = self.at(name);
        let meta = fs::symlink_metadata(&path).context("look")?;
        match is {
            Is::Dir => ensure!(meta.is_dir(), "no directory"),
            Is::Link(to) => {
                let found = fs::read_link(&path)?;
                ensure!(found == Path::new(to), "a link to {}", found.display());
            }
            Is::File(content) => {
                let found = fs::read_to_string(&path)?;
                ensure!(found == *content, "{found:?}");
                let names = self.own.values().filter(|other| *other == is).count();
                ensure!(meta.nlink() == names as u64, "{} names", meta.nlink());
            }
        }
        Ok(())
    }

    fn everybodys(&mut self) -> Result<()> {
        let (a, b) = (self.name(false), self.name(false));
        let (a, b) = (self.at(&a), self.at(&b));
        let done = match self.rng.below(8) {
            0 => fs::create_dir(&a),
            1 => fs::remove_dir(&a),
            2 => fs::remove_file(&a),
            3 => symlink("nowhere", &a),
            4 => fs::hard_link(&a, &b),
            5 => fs::rename(&a, &b),
            6 => fs::read_dir(self.place.join(dir(self.rng.below(DIRS)))).map(|all| {
                all.count();
            }),
            _ => fs::write(&a, "everybody's"),
        };
        match done {
            Err(e) if !may_be(&e) => Err(e).context(format!("{} {}", a.display(), b.display())),
            _ => Ok(()),
        }
    }

    fn check(&self) -> Result<()> {
        let begins = format!("w{}-", self.worker);
        let mut found = Vec::new();
        for n in 0..DIRS {
            for entry in fs::read_dir(self.place.join(dir(n)))? {
                let name = entry?.file_name().to_string_lossy().into_owned();
                if name.starts_with(&begins) {
                    found.push((n, name));
                }
            }
        }
        found.sort();
        let wanted: Vec<_> = self.own.keys().cloned().collect();
        ensure!(found == wanted, "there are {found:?} and not {wanted:?}");
        for (name, is) in &self.own {
            self.look(name, is).with_context(|| format!("{name:?}"))?;
        }
        Ok(())
    }
}

/// Works in directories that were [prepared](prepare). `done` hears of each operation.
pub fn work(
    place: &Path,
    worker: u64,
    seed: u64,
    operations: u64,
    mut done: impl FnMut(u64) -> Result<()>,
) -> Result<()> {
    let mut work = Work {
        place,
        worker,
        rng: Rng::new(seed ^ worker << 32),
        own: BTreeMap::new(),
        made: 0,
    };
    for n in 0..operations {
        let one = match work.rng.below(3) {
            0 => work.everybodys(),
            _ => work.own(),
        };
        one.with_context(|| format!("worker {worker}, seed {seed}, operation {n}"))?;
        done(n)?;
    }
    work.check()
        .with_context(|| format!("worker {worker}, seed {seed}, at the end"))
}

/// What is below a place: each name with what it is, how many names it has, and its content.
pub fn listing(place: &Path) -> Result<Vec<String>> {
    let mut all = Vec::new();
    let mut todo = vec![place.to_owned()];
    while let Some(at) = todo.pop() {
        for entry in fs::read_dir(&at)? {
            let path = entry?.path();
            let meta = fs::symlink_metadata(&path)?;
            let what = if meta.is_dir() {
                todo.push(path.clone());
                "directory".to_owned()
            } else if meta.is_symlink() {
                format!("link to {}", fs::read_link(&path)?.display())
            } else {
                format!("{} {:x}", meta.nlink(), super::sum(&fs::read(&path)?))
            };
            let name = path.strip_prefix(place)?;
            all.push(format!("{} {what}", name.display()));
        }
    }
    all.sort();
    Ok(all)
}
