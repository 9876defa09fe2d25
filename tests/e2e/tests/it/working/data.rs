//! Random operations on one file, each held against what the file should hold: written and read, past the client's cache and through
//! a mapping as well, appended to, cut, made longer, made zeros, renamed, closed and opened again, by the same client or by another one.
//!
//! Every operation depends on the seed alone, so a failure, which names it, can be had again.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr;

use anyhow::{Context, Result, ensure};
use hearth_rig::rng::Rng;

/// No file becomes longer. Large enough to be cached whatever it is called.
const MOST: u64 = 3 << 20;
/// Most bytes of one operation.
const LONGEST: u64 = 128 << 10;
/// What O_DIRECT and mappings are aligned to.
const PAGE: u64 = 4096;
/// So often everything is read, from the server.
const WHOLE: u64 = 400;
/// Operations that are told when one fails.
const TOLD: usize = 20;
/// Names the file has in turn: one that is a disk by its name, and one that is not.
const NAMES: [&str; 2] = ["work.img", "work.log"];

/// One file and what it should hold.
struct Work<'a> {
    /// One directory, as each client has it.
    places: &'a [PathBuf],
    place: usize,
    name: usize,
    file: File,
    model: Vec<u8>,
    rng: Rng,
    last: VecDeque<String>,
    counts: BTreeMap<&'static str, u64>,
    /// Holes can be made: NFS version 3 has no procedure for it.
    punch: bool,
    /// Something may be only in pages that were written through a mapping.
    mapped: bool,
}

/// Memory of whole pages, for O_DIRECT.
struct Pages(ptr::NonNull<u8>, usize);

impl Pages {
    fn new(len: usize) -> Result<Pages> {
        // SAFETY: an anonymous mapping of our own, whose address the kernel chooses.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        Pages::of(at, len)
    }

    /// Of a file, shared with it. It has to be this long.
    fn mapped(file: &File, at: u64, len: usize, write: bool) -> Result<Pages> {
        let write = if write { libc::PROT_WRITE } else { 0 };
        // SAFETY: a mapping of our own, whose address the kernel chooses, of a file that nobody else cuts meanwhile.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                libc::PROT_READ | write,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                at as libc::off_t,
            )
        };
        Pages::of(at, len)
    }

    fn of(at: *mut libc::c_void, len: usize) -> Result<Pages> {
        ensure!(
            at != libc::MAP_FAILED,
            "mmap: {}",
            io::Error::last_os_error()
        );
        let at = ptr::NonNull::new(at.cast()).context("a mapping at 0")?;
        Ok(Pages(at, len))
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: mapped, readable, and so long; nobody else writes to it.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr(), self.1) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: mapped, writable where this is called, and so long; nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_ptr(), self.1) }
    }

    fn sync(&self) -> Result<()> {
        // SAFETY: a mapping of this length.
        let failed = unsafe { libc::msync(self.0.as_ptr().cast(), self.1, libc::MS_SYNC) };
        ensure!(failed == 0, "msync: {}", io::Error::last_os_error());
        Ok(())
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: a mapping of this length that nobody has a reference into any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), self.1) };
    }
}

fn opened(path: &Path, flags: i32) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(flags);
    options.open(path)
}

impl Work<'_> {
    fn path(&self) -> PathBuf {
        self.places[self.place].join(NAMES[self.name])
    }

    fn say(&mut self, what: &'static str, from: u64, to: u64) {
        *self.counts.entry(what).or_default() += 1;
        if self.last.len() == TOLD {
            self.last.pop_front();
        }
        let len = self.model.len();
        self.last
            .push_back(format!("{what} {from}..{to} of {len} bytes"));
    }

    /// A range: within the file as it is, or wherever one may be.
    fn range(&mut self, inside: bool) -> (u64, u64) {
        let most = if inside {
            self.model.len() as u64
        } else {
            MOST
        };
        if most == 0 {
            return (0, 0);
        }
        let from = self.rng.below(most);
        let longest = if self.rng.below(3) == 0 {
            LONGEST
        } else {
            2 * PAGE
        };
        (from, (from + 1 + self.rng.below(longest)).min(most))
    }

    /// The same of whole pages.
    fn pages(&mut self, inside: bool) -> (u64, u64) {
        let (from, to) = self.range(inside);
        let to = to.next_multiple_of(PAGE);
        let end = match inside {
            true => self.model.len() as u64 / PAGE * PAGE,
            false => MOST,
        };
        let from = from / PAGE * PAGE;
        (from, to.min(end).max(from))
    }

    fn data(&mut self, len: u64) -> Vec<u8> {
        let mut data = vec![0; len as usize];
        self.rng.fill(&mut data);
        data
    }

    fn put(&mut self, from: u64, data: &[u8]) {
        let (from, to) = (from as usize, from as usize + data.len());
        if self.model.len() < to {
            self.model.resize(to, 0);
        }
        self.model[from..to].copy_from_slice(data);
    }

    fn compare(&self, from: u64, got: &[u8]) -> Result<()> {
        let wanted = &self.model[from as usize..from as usize + got.len()];
        if wanted == got {
            return Ok(());
        }
        let differs = |(n, (a, b)): (usize, (&u8, &u8))| (a != b).then_some(n);
        let first = wanted.iter().zip(got).enumerate().find_map(differs);
        let first = first.unwrap_or(0);
        let bad = wanted.iter().zip(got).filter(|(a, b)| a != b).count();
        let run = got[first..].iter().take_while(|byte| **byte == 0).count();
        anyhow::bail!(
            "{bad} bytes of {from}..{} are wrong, the first at {}: {} instead of {}; {run} zeros from there",
            from + got.len() as u64,
            from + first as u64,
            got[first],
            wanted[first]
        )
    }

    /// O_DIRECT on a file, past the client's cache.
    fn past(&mut self) -> Result<File> {
        // Linux's NFS client looks at pages that were written through a mapping only when O_DIRECT follows other requests, and not
        // when it follows O_DIRECT.
        if std::mem::take(&mut self.mapped) {
            self.file.sync_all().context("fsync")?;
        }
        opened(&self.path(), libc::O_DIRECT).context("open")
    }

    /// From now on what is read comes from the server.
    fn forget(&self) -> Result<()> {
        self.file.sync_all().context("fsync")?;
        // SAFETY: a descriptor that is open; a length of 0 means up to the end.
        let failed =
            unsafe { libc::posix_fadvise(self.file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        ensure!(failed == 0, "{}", io::Error::from_raw_os_error(failed));
        Ok(())
    }

    fn whole(&mut self) -> Result<()> {
        self.say("read whole", 0, self.model.len() as u64);
        self.forget()?;
        let size = self.file.metadata()?.len();
        ensure!(size == self.model.len() as u64, "it has {size} bytes");
        let mut got = vec![0; self.model.len()];
        self.file.read_exact_at(&mut got, 0).context("read")?;
        self.compare(0, &got)
    }

    fn one(&mut self) -> Result<()> {
        match self.rng.below(32) {
            0..=6 => self.write(),
            7..=11 => self.read(),
            12 | 13 => self.read_past(),
            14 | 15 => self.write_past(),
            16 | 17 => self.read_mapped(),
            18 | 19 => self.write_mapped(),
            20 | 21 => self.resize(),
            22 | 23 => self.append(),
            24 | 25 => self.zero(),
            26 => self.rename(),
            27 | 28 => self.reopen(),
            29 => {
                self.say("fsync", 0, 0);
                self.file.sync_all().context("fsync")
            }
            30 => {
                self.say("forget", 0, 0);
                self.forget()
            }
            _ => {
                self.say("size", 0, 0);
                let size = self.file.metadata()?.size();
                ensure!(size == self.model.len() as u64, "it has {size} bytes");
                Ok(())
            }
        }
    }

    fn write(&mut self) -> Result<()> {
        let (from, to) = self.range(false);
        self.say("write", from, to);
        let data = self.data(to - from);
        self.file.write_all_at(&data, from).context("write")?;
        self.put(from, &data);
        Ok(())
    }

    fn read(&mut self) -> Result<()> {
        let (from, to) = self.range(true);
        self.say("read", from, to);
        let mut got = vec![0; (to - from) as usize];
        self.file.read_exact_at(&mut got, from).context("read")?;
        self.compare(from, &got)
    }

    fn read_past(&mut self) -> Result<()> {
        let (from, to) = self.pages(true);
        self.say("read past the cache", from, to);
        if from == to {
            return Ok(());
        }
        let file = self.past()?;
        let mut pages = Pages::new((to - from) as usize)?;
        file.read_exact_at(pages.bytes_mut(), from)
            .context("read")?;
        self.compare(from, pages.bytes())
    }

    fn write_past(&mut self) -> Result<()> {
        let (from, to) = self.pages(false);
        self.say("write past the cache", from, to);
        if from == to {
            return Ok(());
        }
        let file = self.past()?;
        let data = self.data(to - from);
        let mut pages = Pages::new(data.len())?;
        pages.bytes_mut().copy_from_slice(&data);
        file.write_all_at(pages.bytes(), from).context("write")?;
        self.put(from, &data);
        Ok(())
    }

    fn read_mapped(&mut self) -> Result<()> {
        let (from, to) = self.pages(true);
        self.say("read a mapping", from, to);
        if from == to {
            return Ok(());
        }
        let pages = Pages::mapped(&self.file, from, (to - from) as usize, false)?;
        self.compare(from, pages.bytes())
    }

    fn write_mapped(&mut self) -> Result<()> {
        let (from, to) = self.pages(true);
        self.say("write a mapping", from, to);
        if from == to {
            return Ok(());
        }
        let mut data = self.data(to - from);
        let skip = self.rng.below(data.len() as u64) as usize;
        let data = data.split_off(skip);
        let mut pages = Pages::mapped(&self.file, from, (to - from) as usize, true)?;
        pages.bytes_mut()[skip..].copy_from_slice(&data);
        if self.rng.below(2) == 0 {
            pages.sync()?;
        } else {
            self.mapped = true;
        }
        self.put(from + skip as u64, &data);
        Ok(())
    }

    fn resize(&mut self) -> Result<()> {
        let len = self.rng.below(MOST);
        self.say("make so long", len, len);
        self.file.set_len(len).context("truncate")?;
        self.model.resize(len as usize, 0);
        Ok(())
    }

    fn append(&mut self) -> Result<()> {
        let at = self.model.len() as u64;
        let len = (1 + self.rng.below(LONGEST)).min(MOST - at);
        self.say("append", at, at + len);
        let data = self.data(len);
        let mut file = opened(&self.path(), libc::O_APPEND).context("open")?;
        file.write_all(&data).context("append")?;
        self.put(at, &data);
        Ok(())
    }

    fn zero(&mut self) -> Result<()> {
        let (from, to) = self.range(true);
        self.say("make zeros", from, to);
        if from == to {
            return Ok(());
        }
        let how = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        let (at, len) = (from as libc::off_t, (to - from) as libc::off_t);
        if self.punch {
            // SAFETY: a descriptor that is open.
            let failed = unsafe { libc::fallocate(self.file.as_raw_fd(), how, at, len) } != 0;
            let why = io::Error::last_os_error();
            self.punch = !failed;
            let cannot = why.raw_os_error() == Some(libc::EOPNOTSUPP);
            ensure!(!failed || cannot, "punch: {why}");
        }
        let zeros = vec![0; (to - from) as usize];
        if !self.punch {
            self.file.write_all_at(&zeros, from).context("write")?;
        }
        self.put(from, &zeros);
        Ok(())
    }

    fn rename(&mut self) -> Result<()> {
        self.say("rename", 0, 0);
        let old = self.path();
        self.name = 1 - self.name;
        fs::rename(old, self.path()).context("rename")
    }

    /// Closes it, and opens it as any of the clients.
    fn reopen(&mut self) -> Result<()> {
        // What another client is to see has to be closed first.
        self.file = File::open("/dev/null")?;
        self.place = self.rng.below(self.places.len() as u64) as usize;
        self.say("open again", self.place as u64, 0);
        self.file = opened(&self.path(), 0).context("open")?;
        Ok(())
    }
}

/// Works on a file below `places`, which are one directory as each of some clients has it. What it holds in the end: its name, how long it
/// is, and its sum; and how often each operation was done.
pub fn work(places: &[PathBuf], seed: u64, operations: u64) -> Result<String> {
    let path = places.first().context("a place")?.join(NAMES[0]);
    File::create(&path).context("create")?;
    let mut work = Work {
        places,
        place: 0,
        name: 0,
        file: opened(&path, 0)?,
        model: Vec::new(),
        rng: Rng::new(seed),
        last: VecDeque::new(),
        counts: BTreeMap::new(),
        punch: true,
        mapped: false,
    };
    for n in 0..operations {
        let done = match n % WHOLE {
            0 => work.whole().and_then(|()| work.one()),
            _ => work.one(),
        };
        if let Err(e) = done {
            let last: Vec<_> = work.last.into();
            return Err(e.context(format!("seed {seed}, operation {n}: {}", last.join("; "))));
        }
    }
    work.whole()
        .with_context(|| format!("seed {seed}, at the end"))?;
    Ok(format!(
        "{} {} {:x} {:?}",
        NAMES[work.name],
        work.model.len(),
        super::sum(&work.model),
        work.counts
    ))
}
