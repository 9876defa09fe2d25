//! A host that keeps a datastore busy as ESXi does, for as long as is wanted: durable writes of 4 to 64 KiB with 32 in flight, a
//! heartbeat every second and a lock file renewed every ten, each over a connection of its own. It goes on over a restart
//! of the server, and knows in the end what each block must hold.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use hearth_nfs::v3::{Args, Create, How, Named, SetAttributes, Status};
use hearth_rig::rng::Rng;
use hearth_rig::wait;

use crate::nfs::Client;

/// Writes in flight.
const DEPTH: usize = 32;
/// Where writes begin: a guest does not write where it is writing already.
const PLACE: u64 = 64 << 10;
const HEARTBEAT: Duration = Duration::from_secs(1);
const RENEWAL: Duration = Duration::from_secs(10);
/// A server that is not back by then is not waited for.
const GONE: Duration = Duration::from_secs(120);
/// Bytes of a place that are looked at in the end: the shortest write has so many.
const HEAD: usize = 4096;

#[derive(Default)]
struct Counts {
    stop: AtomicBool,
    writes: AtomicU64,
    wait_us: AtomicU64,
    beats: AtomicU64,
    beat_us: AtomicU64,
    renewals: AtomicU64,
    again: AtomicU64,
}

/// What happened in some time.
#[derive(Clone, Copy, Debug)]
pub struct Told {
    /// Writes that were answered.
    pub writes: u64,
    /// The longest wait for one, milliseconds.
    pub wait_ms: f64,
    /// Heartbeats that were answered.
    pub beats: u64,
    /// The longest wait for one, milliseconds.
    pub beat_ms: f64,
    /// Renewals of the lock that were answered.
    pub renewals: u64,
    /// Calls that were to be asked again.
    pub again: u64,
}

impl Counts {
    fn take(&self) -> Told {
        let take = |count: &AtomicU64| count.swap(0, Ordering::SeqCst);
        Told {
            writes: take(&self.writes),
            wait_ms: take(&self.wait_us) as f64 / 1e3,
            beats: take(&self.beats),
            beat_ms: take(&self.beat_us) as f64 / 1e3,
            renewals: take(&self.renewals),
            again: take(&self.again),
        }
    }

    fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}

/// Where a datastore is.
#[derive(Clone, Debug)]
struct At {
    server: SocketAddr,
    export: String,
    file: String,
}

impl At {
    fn connect(&self) -> Result<Client> {
        Client::connect(self.server, &self.export, &self.file)
    }

    /// The same, of a server that may be on its way back.
    fn again(&self) -> Result<Client> {
        wait::until("the server is back", GONE, || self.connect().ok())
    }
}

/// The last write that was answered, of each place.
type Newest = BTreeMap<u64, u64>;

/// A host at work.
#[derive(Debug)]
pub struct Host {
    counts: Arc<Counts>,
    writer: JoinHandle<Result<Newest>>,
    /// Dropped, it wakes those who wait for their time.
    bell: Vec<mpsc::Sender<()>>,
    others: Vec<JoinHandle<Result<()>>>,
}

impl std::fmt::Debug for Counts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Counts").finish_non_exhaustive()
    }
}

impl Host {
    /// Starts one that writes all over a file of `size` bytes.
    pub fn start(server: SocketAddr, export: &str, file: &str, size: u64) -> Result<Host> {
        let at = At {
            server,
            export: export.to_owned(),
            file: file.to_owned(),
        };
        let counts = Arc::new(Counts::default());
        let mut client = at.connect()?;
        let lock = make_lock(&mut client, file)?;
        let (own, there) = (counts.clone(), at.clone());
        let writer = thread::spawn(move || write(&there, client, size, &own));
        let mut host = Host {
            counts,
            writer,
            bell: Vec::new(),
            others: Vec::new(),
        };
        host.every(HEARTBEAT, &at, |client, counts, since| {
            let (dir, _) = client.handles();
            let dir = dir.to_vec();
            if ask(client, &Args::GetAttr { file: &dir }, counts)? {
                counts.beats.fetch_add(1, Ordering::SeqCst);
            }
            longest(&counts.beat_us, since);
            Ok(())
        });
        host.every(RENEWAL, &at, move |client, counts, _| {
            let data = [7; 84];
            if ask(client, &Args::durable(&lock, 0, &data), counts)? {
                counts.renewals.fetch_add(1, Ordering::SeqCst);
            }
            Ok(())
        });
        Ok(host)
    }

    /// Does something at once and every so often, over a connection of its own. It is told since when it is due; what fails because the
    /// connection does is done again over another one.
    fn every(
        &mut self,
        time: Duration,
        at: &At,
        mut work: impl FnMut(&mut Client, &Counts, Instant) -> Result<()> + Send + 'static,
    ) {
        let (bell, wake) = mpsc::channel();
        let (at, counts) = (at.clone(), self.counts.clone());
        self.bell.push(bell);
        self.others.push(thread::spawn(move || {
            let mut client = at.connect()?;
            let mut due = Instant::now();
            while !counts.stopped() {
                while work(&mut client, &counts, due).is_err() {
                    client = at.again()?;
                }
                due += time;
                let rest = due.saturating_duration_since(Instant::now());
                if rest.is_zero() {
                    due = Instant::now();
                }
                let _ = wake.recv_timeout(rest);
            }
            Ok(())
        }));
    }

    /// What happened since this was asked before.
    pub fn told(&self) -> Told {
        self.counts.take()
    }

    /// Writes that were answered since then, so far.
    pub fn writes(&self) -> u64 {
        self.counts.writes.load(Ordering::SeqCst)
    }

    /// True if it does not write any more, for a reason that [`end`](Host::end) tells.
    pub fn has_failed(&self) -> bool {
        self.writer.is_finished()
    }

    /// Ends it when all is answered that was asked for. What each place must hold.
    pub fn end(self) -> Result<Written> {
        self.counts.stop.store(true, Ordering::SeqCst);
        drop(self.bell);
        let joined = |e| anyhow::anyhow!("a thread panicked: {e:?}");
        let newest = self.writer.join().map_err(joined)??;
        for other in self.others {
            other.join().map_err(joined)??;
        }
        Ok(Written(newest))
    }
}

/// What a file must hold.
#[derive(Debug)]
pub struct Written(Newest);

impl Written {
    /// Looks whether it does; how many places were looked at.
    pub fn check(&self, file: &Path) -> Result<usize> {
        let opened = File::open(file).with_context(|| format!("open {}", file.display()))?;
        let read = |offset| {
            let mut head = vec![0; HEAD];
            opened.read_exact_at(&mut head, offset)?;
            Ok(head)
        };
        self.check_by(&file.display().to_string(), read)
    }

    /// The same by way of the server.
    pub fn check_over(&self, client: &mut Client) -> Result<usize> {
        self.check_by("the file", |offset| client.read_back(offset, HEAD as u32))
    }

    fn check_by(&self, name: &str, mut read: impl FnMut(u64) -> Result<Vec<u8>>) -> Result<usize> {
        for (place, number) in &self.0 {
            let offset = place * PLACE;
            ensure!(
                read(offset)? == pattern(offset, HEAD, *number),
                "{name} does not hold at {offset} what was answered last"
            );
        }
        Ok(self.0.len())
    }
}

fn longest(most: &AtomicU64, since: Instant) {
    most.fetch_max(since.elapsed().as_micros() as u64, Ordering::SeqCst);
}

/// Asks until there is an answer that says something. False if it is an error: a name that is gone, say, is one for the caller.
fn ask(client: &mut Client, args: &Args<'_>, counts: &Counts) -> Result<bool> {
    loop {
        client.begin(args)?;
        match client.answered()? {
            (_, status) if status == Status::JukeBox as u32 => {
                counts.again.fetch_add(1, Ordering::SeqCst);
            }
            (_, status) => return Ok(status == 0),
        }
    }
}

/// Makes the lock beside a disk, which is its maker's alone; its handle.
fn make_lock(client: &mut Client, file: &str) -> Result<Vec<u8>> {
    let name = format!(".lck-{file}");
    let dir = client.handles().0.to_vec();
    let set = SetAttributes {
        mode: Some(0o644),
        ..SetAttributes::default()
    };
    let at = Named {
        dir: &dir,
        name: name.as_bytes(),
    };
    let what = Create::File(How::Guarded(set));
    let counts = Counts::default();
    // Of an earlier run.
    ask(client, &Args::Remove(at), &counts)?;
    let made = ask(client, &Args::Create { at, what }, &counts)?;
    ensure!(made, "the lock cannot be made");
    let disk = client.handles().1.to_vec();
    client.find(&name)?;
    let lock = client.handles().1.to_vec();
    client.find(file)?;
    ensure!(
        client.handles().1 == disk,
        "the disk has another handle now"
    );
    Ok(lock)
}

/// What is in every write: where it was meant to be, and which one of those there it is.
fn pattern(offset: u64, len: usize, number: u64) -> Vec<u8> {
    let words = (0..len / 8).map(|n| (offset + n as u64 * 8) ^ number.rotate_left(40));
    words.flat_map(u64::to_le_bytes).collect()
}

/// A write on its way.
struct Flying {
    place: u64,
    number: u64,
    len: usize,
    since: Instant,
}

fn write(at: &At, mut client: Client, size: u64, counts: &Counts) -> Result<Newest> {
    let mut rng = Rng::new(1);
    let mut newest = Newest::new();
    let (mut flying, mut busy) = (HashMap::<u64, Flying>::new(), HashSet::new());
    let mut waiting: Vec<Flying> = Vec::new();
    let mut number = 0;
    loop {
        while !counts.stopped() && flying.len() + waiting.len() < DEPTH {
            let place = rng.below(size / PLACE);
            if busy.insert(place) {
                number += 1;
                let len = [4096, 8192, 16384, 65536][rng.below(4) as usize];
                waiting.push(Flying {
                    place,
                    number,
                    len,
                    since: Instant::now(),
                });
            }
        }
        if waiting.is_empty() && flying.is_empty() {
            return Ok(newest);
        }
        let went = turn(&mut client, &mut waiting, &mut flying);
        let Ok((xid, status)) = went else {
            // All that was not answered is asked again.
            client = at.again()?;
            waiting.extend(flying.drain().map(|(_, write)| write));
            continue;
        };
        let done = flying.remove(&xid).context("an answer to nothing")?;
        longest(&counts.wait_us, done.since);
        if status == Status::JukeBox as u32 {
            counts.again.fetch_add(1, Ordering::SeqCst);
            waiting.push(done);
            continue;
        }
        ensure!(status == 0, "a write was answered with status {status}");
        busy.remove(&done.place);
        newest.insert(done.place, done.number);
        counts.writes.fetch_add(1, Ordering::SeqCst);
    }
}

/// Sends what waits, and takes an answer.
fn turn(
    client: &mut Client,
    waiting: &mut Vec<Flying>,
    flying: &mut HashMap<u64, Flying>,
) -> Result<(u64, u32)> {
    while let Some(write) = waiting.pop() {
        let offset = write.place * PLACE;
        let data = pattern(offset, write.len, write.number);
        let file = client.handles().1.to_vec();
        match client.begin(&Args::durable(&file, offset, &data)) {
            Ok(xid) => flying.insert(xid, write),
            Err(e) => {
                waiting.push(write);
                return Err(e);
            }
        };
    }
    client.answered()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_lacks_a_write_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("disk.img");
        let opened = File::create(&file).unwrap();
        opened.set_len(4 * PLACE).unwrap();
        let written = Written([(1, 7), (3, 9)].into());
        for (place, number) in &written.0 {
            let data = pattern(place * PLACE, 8192, *number);
            opened.write_all_at(&data, place * PLACE).unwrap();
        }
        assert_eq!(written.check(&file).unwrap(), 2);
        // The write before it.
        let data = pattern(3 * PLACE, HEAD, 8);
        opened.write_all_at(&data, 3 * PLACE).unwrap();
        let why = written.check(&file).unwrap_err().to_string();
        assert!(why.contains("196608"), "{why}");
    }
}
