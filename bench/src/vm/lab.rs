//! A daemon with disks in every state the tables ask for.
//!
//! A state is made by untimed work: a cold disk is added anew, a warm one is swept until all of
//! it is on flash. What a write cell leaves dirty is thrown away after it, with the disk, rather
//! than destaged: neither its leftovers nor its drain meet the next cell.

use super::room::Need;
use super::{Mode, Options, Over, Run, Slow, scratch};
use crate::fixture;
use crate::peers::{self, At, Contender};
use anyhow::Result;
use hearth_rig::Hearth;
use hearth_rig::daemon::path;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// Room of the pool beside what is cached: its own structures, and eviction's reserve.
pub const POOL_SLACK: u64 = 128 << 20;

/// What a row of a table measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The slow disk without any server.
    SlowRaw,
    /// The slow disk as an export that was never cached.
    SlowAlone,
    /// A cached disk whose cache was switched off.
    Off,
    /// Nothing on flash.
    Cold(Mode),
    /// Everything on flash.
    Warm(Mode),
    /// A file on the flash as an export without a cache.
    FlashAlone,
    /// The same file without any server.
    FlashRaw,
}

impl State {
    /// The row's name.
    pub fn name(self) -> String {
        match self {
            State::SlowRaw => "slow disk, no server".to_owned(),
            State::SlowAlone => "slow disk alone".to_owned(),
            State::Off => "cache off".to_owned(),
            State::Cold(mode) => format!("cold, {}", mode.word()),
            State::Warm(mode) => format!("warm, {}", mode.word()),
            State::FlashAlone => "flash alone".to_owned(),
            State::FlashRaw => "flash, no server".to_owned(),
        }
    }

    /// Rows in the order of a table.
    pub fn all(modes: &[Mode]) -> Vec<State> {
        let mut all = vec![State::SlowRaw, State::SlowAlone, State::Off];
        all.extend(modes.iter().map(|m| State::Cold(*m)));
        all.extend(modes.iter().map(|m| State::Warm(*m)));
        all.extend([State::FlashAlone, State::FlashRaw]);
        all
    }

    fn disk(self) -> &'static str {
        match self {
            State::SlowRaw | State::SlowAlone => "alone",
            State::Off | State::Cold(_) => "cache",
            State::Warm(Mode::WriteBack) => "warm-back",
            State::Warm(Mode::WriteThrough) => "warm-through",
            State::Warm(Mode::WriteAround) => "warm-around",
            State::FlashAlone | State::FlashRaw => "flash",
        }
    }
}

/// The prefix that makes an origin slow, and the directory of the slow disk's files.
fn slow_place(options: &Options) -> (&'static str, &Path) {
    match &options.slow {
        Slow::Model => ("model-hdd:", &options.flash),
        Slow::Directory(dir) => ("", dir),
    }
}

/// Bytes of the pool: each warm disk whole, a cold one, and a burst of writes.
fn pool_size(options: &Options) -> u64 {
    (options.modes.len() as u64 + 2) * options.size / 4 * 5 + POOL_SLACK
}

/// Names of the files on the slow disk.
fn slow_files(modes: &[Mode]) -> Vec<&'static str> {
    let warm = modes.iter().map(|m| State::Warm(*m).disk());
    ["alone", "cache"].into_iter().chain(warm).collect()
}

/// What [`Lab::set_up`] writes, and where.
pub fn needs(options: &Options) -> [Need; 2] {
    let slow = slow_files(&options.modes).len() as u64;
    [
        Need {
            place: slow_place(options).1.to_owned(),
            bytes: slow * options.size,
        },
        Need {
            place: options.flash.clone(),
            // The pool, and the file that stands for the flash alone.
            bytes: pool_size(options) + options.size,
        },
    ]
}

/// What a disk's cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cached {
    /// Nothing that matters: a disk without a cache.
    Uncached,
    /// Everything.
    All,
    /// Everything but what was written past it.
    Holes,
}

/// The daemon, its files, and the state of its disks.
pub struct Lab {
    hearth: Hearth,
    /// Prefix that makes an origin slow; empty for a slow disk that is real.
    wrapper: &'static str,
    slow: TempDir,
    flash_file: PathBuf,
    size: u64,
    disks: HashMap<&'static str, Cached>,
}

impl Lab {
    /// Files and a served pool for the states of the run's modes.
    pub fn set_up(run: &mut Run) -> Result<Lab> {
        let options: &Options = run.options;
        let (wrapper, parent) = slow_place(options);
        let slow = scratch(parent)?;
        let size = options.size;
        run.step(0.0, "writing files")?;
        let stop = || run.go_on();
        let pool = pool_size(options);
        let hearth = fixture::pool_unless(&options.hearth, &options.flash, pool, &stop)?;
        let flash_file = fixture::file_unless(hearth.dir(), "flash-alone.img", size, &stop)?;
        for name in slow_files(&options.modes) {
            fixture::file_unless(slow.path(), &format!("{name}.img"), size, &stop)?;
        }
        Ok(Lab {
            hearth,
            wrapper,
            slow,
            flash_file,
            size,
            disks: HashMap::new(),
        })
    }

    /// True if the slow disk is a model.
    pub fn is_modelled(&self) -> bool {
        !self.wrapper.is_empty()
    }

    /// Bytes written to flash by the pool so far.
    pub fn flash_written(&self) -> Result<f64> {
        fixture::flash_written(&self.hearth)
    }

    fn file(&self, state: State) -> PathBuf {
        match state {
            State::FlashAlone | State::FlashRaw => self.flash_file.clone(),
            other => self.slow.path().join(format!("{}.img", other.disk())),
        }
    }

    /// Brings the disk of `state` into that state; `writing` if the cell is to write. What to
    /// connect to.
    pub fn prepare(
        &mut self,
        state: State,
        over: Over,
        writing: bool,
        stop: &dyn Fn() -> Result<()>,
    ) -> Result<Contender> {
        let name = state.disk();
        match state {
            State::SlowRaw | State::FlashRaw => {
                // The daemon has locked the file of a disk it serves.
                self.remove(name)?;
                return Ok(peers::raw(&self.file(state)));
            }
            State::SlowAlone | State::FlashAlone => {
                if !self.disks.contains_key(name) {
                    self.add(state, "off")?;
                }
            }
            State::Off => {
                self.remove(name)?;
                self.add(state, Mode::WriteBack.word())?;
                self.hearth.ok(&["disk", "set", name, "--mode", "off"])?;
            }
            State::Cold(mode) => {
                self.remove(name)?;
                self.add(state, mode.word())?;
            }
            State::Warm(mode) => {
                // A write past the cache asks nothing of the blocks others left behind.
                let enough = match self.disks.get(name) {
                    Some(Cached::All) => true,
                    Some(Cached::Holes) => writing && mode != Mode::WriteBack,
                    _ => false,
                };
                if !enough {
                    self.remove(name)?;
                    self.add(state, mode.word())?;
                    fixture::warm_unless(&self.hearth, name, self.size, stop)?;
                    self.disks.insert(name, Cached::All);
                }
            }
        }
        Ok(Contender {
            name: state.name(),
            at: match over {
                Over::Nbd => At::Uri(self.hearth.uri(name)),
                Over::VhostUser => At::Vhost(self.hearth.vhost_socket(name)),
            },
            pid: self.hearth.pid(),
        })
    }

    /// Cleans up after a cell.
    pub fn after(&mut self, state: State, wrote: bool) -> Result<()> {
        let name = state.disk();
        match state {
            State::Cold(_) | State::Off | State::Warm(Mode::WriteBack) if wrote => {
                self.remove(name)
            }
            State::Warm(_) if wrote => {
                self.disks.insert(name, Cached::Holes);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn add(&mut self, state: State, mode: &str) -> Result<()> {
        let file = self.file(state);
        let wrapper = match state {
            State::FlashAlone | State::FlashRaw => "",
            _ => self.wrapper,
        };
        let origin = format!("{wrapper}{}", path(&file));
        fixture::add(&self.hearth, state.disk(), &origin, mode)?;
        self.disks.insert(state.disk(), Cached::Uncached);
        Ok(())
    }

    fn remove(&mut self, name: &'static str) -> Result<()> {
        if self.disks.remove(name).is_some() {
            self.hearth
                .ok(&["disk", "remove", name, "--discard-dirty", "--yes"])?;
        }
        Ok(())
    }
}
