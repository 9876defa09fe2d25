//! What an ESXi host does with a datastore that it has mounted, after what is known of one: it makes lock files beside
//! its disks and keeps renewing them, makes thin disks by their size, writes everything durably with many
//! requests in flight, and declares the datastore dead when a heartbeat stays unanswered.

use std::fs;
use std::net::SocketAddr;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hearth_nfs::v3::{Args, Create, How, Named, SetAttributes, Status};

use crate::common::{Client, Results, get, set_size};

/// After which a host takes a heartbeat for lost.
const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(5);
const DEPTH: usize = 32;
const WRITES: usize = 1500;
const DISK: u64 = 64 << 20;
/// Its lock is renewed after so many answers, as a host does every ten seconds.
const RENEW: usize = 100;

fn create(client: &mut Client, dir: &[u8], name: &str) -> Result<Vec<u8>> {
    let set = SetAttributes {
        mode: Some(0o644),
        ..SetAttributes::default()
    };
    let at = Named {
        dir,
        name: name.as_bytes(),
    };
    let results = client
        .call(&Args::Create {
            at,
            what: Create::File(How::Guarded(set)),
        })?
        .ok()?;
    let handle = results
        .reader()
        .optional(|r| r.opaque(64).map(<[u8]>::to_vec))?;
    handle.context("a handle")
}

/// What is in every write: where it was meant to be, and which one of those there it is.
fn pattern(offset: u64, len: usize, number: u64) -> Vec<u8> {
    let words = (0..len / 8).map(|n| (offset + n as u64 * 8) ^ number.rotate_left(40));
    words.flat_map(u64::to_le_bytes).collect()
}

/// Works with a datastore. `settle` sees to it that what was answered is in the directory's files.
pub fn work(
    address: SocketAddr,
    root: &[u8],
    dir: &Path,
    settle: impl FnOnce() -> Result<()>,
) -> Result<()> {
    work_long(address, root, &[dir], (DISK, WRITES), settle)
}

/// The same, with a disk of this size and so many writes. Of two directories that hold the datastore, either has what was answered.
pub fn work_long(
    address: SocketAddr,
    root: &[u8],
    dirs: &[&Path],
    (size, writes): (u64, usize),
    settle: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let mut client = Client::connect(address)?;
    client.patient = true;

    // A thin disk, and the lock beside it, which is named after the disk's number.
    let disk = create(&mut client, root, "vm-flat.vmdk")?;
    set_size(&mut client, &disk, size)?.ok()?;
    let id = get(&mut client, &disk)?.id;
    if let [dir] = dirs {
        ensure!(id == fs::metadata(dir.join("vm-flat.vmdk"))?.ino());
    }
    let name: String = id
        .to_le_bytes()
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    let name = format!(".lck-{name}");
    let lock = create(&mut client, root, &name)?;
    client.call(&Args::durable(&lock, 0, b"host-1"))?.ok()?;
    // Another host does not get it.
    let mut other = Client::connect(address)?;
    let set = SetAttributes::default();
    let what = Create::File(How::Guarded(set));
    other
        .call(&Args::Create {
            at: Named {
                dir: root,
                name: name.as_bytes(),
            },
            what,
        })?
        .is(Status::Exist)?;

    let done = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        let heart = scope.spawn(|| -> Result<(Duration, u32)> {
            let mut client = Client::connect(address)?;
            let (mut slowest, mut beats) = (Duration::ZERO, 0);
            while !done.load(Ordering::Relaxed) {
                let since = Instant::now();
                get(&mut client, root)?;
                slowest = slowest.max(since.elapsed());
                beats += 1;
            }
            Ok((slowest, beats))
        });
        let worked = load(&mut client, &disk, &lock, (size, writes));
        done.store(true, Ordering::Relaxed);
        let (slowest, beats) = heart.join().expect("no panic")?;
        let newest = worked?;
        ensure!(beats > 0);
        // The other host has seen every renewal: the time of the lock is not that of its making.
        let seen = get(&mut other, &lock)?;
        ensure!(seen.size == 8 && seen.modified == get(&mut client, &lock)?.modified);
        settle()?;
        // What is in the file is what was answered last, whole.
        for dir in dirs {
            let file = fs::File::open(dir.join("vm-flat.vmdk"))?;
            for (block, number) in &newest {
                let offset = block * 65536;
                let mut head = [0; 4096];
                file.read_exact_at(&mut head, offset)?;
                ensure!(head[..] == pattern(offset, 4096, *number), "block {block}");
            }
        }
        eprintln!("slowest of {beats} heartbeats: {slowest:?}");
        ensure!(slowest < HEARTBEAT_TIMEOUT, "{slowest:?}");
        Ok(())
    })
}

/// Writes durably with many requests in flight, and renews the lock in between: which write is the
/// newest of every block.
fn load(
    client: &mut Client,
    disk: &[u8],
    lock: &[u8],
    (size, writes): (u64, usize),
) -> Result<Vec<(u64, u64)>> {
    let blocks = size / 65536;
    let mut newest = std::collections::BTreeMap::new();
    let mut flying = std::collections::HashMap::new();
    let mut busy = std::collections::HashSet::new();
    let mut renewing = std::collections::HashSet::new();
    let (mut sent, mut answered, mut dice) = (0, 0, 0x2545_f491_4f6c_dd1du64);
    while answered < writes {
        while sent < writes && flying.len() < DEPTH {
            dice ^= dice << 13;
            dice ^= dice >> 7;
            dice ^= dice << 17;
            let block = dice % blocks;
            // A guest does not write where it is writing already.
            if !busy.insert(block) {
                continue;
            }
            let len = [4096, 8192, 16384, 65536][(dice >> 32) as usize % 4];
            let number = sent as u64;
            let data = pattern(block * 65536, len, number);
            let xid = client.send(&Args::durable(disk, block * 65536, &data))?;
            flying.insert(xid, (block, number, len));
            sent += 1;
        }
        let (xid, answer) = client.receive()?.context("the server has hung up")?;
        let results = Results::of(&answer)?;
        // A host repeats a call that takes longer than the server waits.
        let is_later = results.status == Status::JukeBox as u32;
        if !is_later {
            results.ok()?;
        }
        let Some((block, number, len)) = flying.remove(&xid) else {
            ensure!(renewing.remove(&xid));
            if is_later {
                renewing.insert(renew(client, lock, answered)?);
            }
            continue;
        };
        if is_later {
            let data = pattern(block * 65536, len, number);
            let xid = client.send(&Args::durable(disk, block * 65536, &data))?;
            flying.insert(xid, (block, number, len));
            continue;
        }
        answered += 1;
        busy.remove(&block);
        newest.insert(block, number);
        if answered % RENEW == 0 {
            renewing.insert(renew(client, lock, answered)?);
        }
    }
    for xid in renewing {
        let mut results = client.results(xid)?;
        while results.status == Status::JukeBox as u32 {
            let xid = renew(client, lock, answered)?;
            results = client.results(xid)?;
        }
        results.ok()?;
    }
    Ok(newest.into_iter().collect())
}

/// Asks for a renewal of the lock; the number of the call.
fn renew(client: &mut Client, lock: &[u8], answered: usize) -> Result<u32> {
    client.send(&Args::durable(lock, 0, &(answered as u64).to_le_bytes()))
}
