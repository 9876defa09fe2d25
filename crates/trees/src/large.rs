//! A large file, which is a disk of the cache: file, log and registry in step.
//!
//! To the engine such a file never ends: behind its end are zeros, and what is written back is cut off there. What has to hold
//! for that: *behind the file's end, all copies on flash are zeros or void.* And while the registry promises that the file looks
//! as it was left, it does: what is cached is believed by it.
//!
//! - **Grown:** the registry's bound, durably, then the file, and if what follows is to be durable, that as well. Only then comes
//!   what is written: the log never holds an answered write behind the end.
//! - **Cut:** what is cut off becomes zeros in the log, durably, up to the end of its last block, wherever the file or the log has
//!   data; then the file is cut, durably. The other way round a crash in between would bring back what was cut off as soon as the file grows again.
//! - **Changed** in any way: first the promise is taken back, durably.
//! - **Closed:** the file has everything, and that is durable; then the promise is given.
//! - **Opened** with something in the log that the file has not: what lies behind the end was never answered as durable. It
//!   becomes zeros before anything is written back or the file can grow.
//! - **Gone:** first its name, durably, then its record, and with that all that is cached. What the file system calls it is
//!   never given to another file, so a record that outlives its file does no harm.

/// Bytes of a block of the cache: what a file ends with is cached with the rest of its block.
pub const BLOCK: u64 = 4096;
/// What a bound of a file's length is a multiple of.
pub const STEP: u64 = 1 << 30;

/// Steps on a file that is a disk.
pub trait Large {
    /// Why a step failed.
    type Error;
    /// Bytes the file has.
    fn size(&self) -> u64;
    /// How many of them a power cut leaves it.
    fn synced(&self) -> u64;
    /// How long the registry says that it may be.
    fn bound(&self) -> u64;
    /// What its bound is a multiple of.
    fn step(&self) -> u64 {
        STEP
    }
    /// Has the registry say more, durably.
    fn raise(&self, bound: u64) -> Result<(), Self::Error>;
    /// Takes the promise back that the file looks as it was left, durably. Done again, it costs nothing.
    fn withdraw(&self) -> Result<(), Self::Error>;
    /// Makes the file longer. Not durable.
    fn grow(&self, len: u64) -> Result<(), Self::Error>;
    /// Makes the file this long, and what else is to be changed with it, durably.
    fn set(&self, len: u64) -> Result<(), Self::Error>;
    /// Makes durable what the file has, and how much that is.
    fn sync(&self) -> Result<(), Self::Error>;
    /// Makes a range zeros, in the log, durably. It may reach behind the end.
    fn zero(&self, from: u64, to: u64) -> Result<(), Self::Error>;
}

/// Where the bound of a file of this length is, in multiples of `step`, if no disk is longer than `most`.
pub fn bound(len: u64, step: u64, most: u64) -> u64 {
    len.max(1).next_multiple_of(step).min(most)
}

/// Has the registry know that a file may be so long, before it is.
pub fn allow<L: Large + ?Sized>(file: &L, len: u64, most: u64) -> Result<(), L::Error> {
    let bound = bound(len, file.step(), most);
    if bound > file.bound() {
        file.raise(bound)?;
    }
    Ok(())
}

/// Sees to it that a file has `len` bytes before somebody writes as far as that. With `durable`, after a power cut as well.
pub fn reach<L: Large + ?Sized>(
    file: &L,
    len: u64,
    durable: bool,
    most: u64,
) -> Result<(), L::Error> {
    if len > file.size() {
        allow(file, len, most)?;
        file.withdraw()?;
        file.grow(len)?;
    }
    if durable && len > file.synced() {
        file.sync()?;
    }
    Ok(())
}

/// Makes a file this long, longer or shorter, durably. Nobody else may read or write it meanwhile.
pub fn resize<L: Large + ?Sized>(file: &L, len: u64, most: u64) -> Result<(), L::Error> {
    allow(file, len, most)?;
    let old = file.size();
    if len < old {
        file.zero(len, old.next_multiple_of(BLOCK))?;
    }
    file.withdraw()?;
    file.set(len)
}

/// Makes durable how long a file is, before what was written to it unstably is made durable.
pub fn commit<L: Large + ?Sized>(file: &L) -> Result<(), L::Error> {
    if file.size() > file.synced() {
        file.sync()?;
    }
    Ok(())
}

/// What the log may hold behind the `end` of a file that is opened becomes zeros: the parts (from, length) of `behind`. Nothing may be
/// written to the file before.
pub fn settle<E>(
    end: u64,
    behind: impl IntoIterator<Item = (u64, u64)>,
    mut zero: impl FnMut(u64, u64) -> Result<(), E>,
) -> Result<(), E> {
    for (from, len) in behind {
        let to = from.saturating_add(len);
        let from = from.max(end);
        if from < to {
            zero(from, to)?;
        }
    }
    Ok(())
}
