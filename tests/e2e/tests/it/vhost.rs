//! vhost-user-blk with real front ends: what a guest may do, what it may not, and what it does
//! not notice.
//!
//! Exclusive: processors

use anyhow::{Context, Result, ensure};
use hearth_rig::blk::Disk;
use hearth_rig::clients::have;
use hearth_rig::daemon::path;
use hearth_rig::guest::{BASE, DATA, Guest, How, SIZE, encode, feature, flag, kind};
use hearth_rig::machine::attach_args;
use hearth_rig::rng::Rng;
use hearth_rig::{Hearth, wait};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(30);
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

/// A daemon with one disk, its content, and the socket.
fn served(size: u64, more: &[&str]) -> Result<(Hearth, Vec<u8>)> {
    let hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", size)?;
    hearth.add("d", path(&origin), more)?;
    Ok((hearth, std::fs::read(origin)?))
}

/// A counter of the pool since the daemon's start; a name that is not there is an error.
fn pool_counter(hearth: &Hearth, name: &str) -> Result<u64> {
    let stats = hearth.pool_stats()?;
    let counter = stats["spans"][0]["counters"][name].as_u64();
    counter.with_context(|| format!("no counter {name} in {stats}"))
}

fn guest(hearth: &Hearth) -> Result<Guest> {
    Guest::connect(&hearth.vhost_socket("d"), 1, How::default())
        .with_context(|| format!("daemon's log:\n{}", hearth.log()))
}

#[test]
fn libblkio_reads_and_writes() -> Result<()> {
    let (hearth, mut disk) = served(16 * MIB, &[])?;
    let mut client = Disk::vhost(&hearth.vhost_socket("d"), 4 << 20)?;
    ensure!(client.capacity == 16 * MIB);
    let mut rng = Rng::new(11);
    for round in 0..400 {
        // Any sector, any length, any place in memory; in one piece or several.
        let len = (1 + rng.below(if round % 8 == 0 { 2048 } else { 40 })) as usize * 512;
        let offset = rng.below((16 * MIB - len as u64) / 512) * 512;
        let unaligned = if round % 3 == 0 { 0 } else { rng.below(4096) };
        let at = unaligned as usize;
        let range = offset as usize..offset as usize + len;
        let pieces = match round % 4 {
            0 if len > 1024 => vec![(at, 512), (at + (1 << 20), len - 1024), (at + 512, 512)],
            _ => vec![(at, len)],
        };
        match rng.below(4) {
            0 => {
                for (at, len) in &pieces {
                    rng.fill(&mut client.memory()[*at..at + len]);
                }
                let mut to = range.start;
                for (at, len) in &pieces {
                    disk[to..to + len].copy_from_slice(&client.memory()[*at..at + len]);
                    to += len;
                }
                client.write_pieces(offset, &pieces)?;
            }
            1 if round % 5 == 0 => {
                client.zero(offset, len as u64)?;
                disk[range].fill(0);
            }
            _ => {
                client.read_pieces(offset, &pieces)?;
                let mut from = range.start;
                for (at, len) in &pieces {
                    ensure!(
                        client.memory()[*at..at + len] == disk[from..from + len],
                        "wrong data in round {round}, {len} bytes at {from}"
                    );
                    from += len;
                }
            }
        }
        if round % 50 == 0 {
            client.flush()?;
        }
    }
    // Whole aligned megabytes, in one piece: straight into the client's memory.
    for at in 0..4 {
        client.read(at * MIB, 0, MIB as usize)?;
        let range = (at * MIB) as usize..((at + 1) * MIB) as usize;
        ensure!(client.memory()[..MIB as usize] == disk[range]);
    }
    client.flush()?;
    hearth.ok(&["disk", "flush", "d"])?;
    ensure!(std::fs::read(hearth.dir().join("o.img"))? == disk);
    // What comes over shared memory is watched like everything else.
    let counted = hearth.ok(&["histogram", "d", "--json"])?;
    let counted: serde_json::Value = serde_json::from_str(&counted)?;
    let requests = counted["histograms"][0]["count"].as_u64().unwrap_or(0);
    ensure!(requests > 300, "{requests} requests were seen");
    Ok(())
}

#[test]
fn what_a_device_says_of_itself() -> Result<()> {
    let (hearth, disk) = served(8 * MIB, &[])?;
    let mut g = guest(&hearth)?;
    ensure!(g.features & feature::RO == 0);
    for wanted in [
        feature::FLUSH,
        feature::DISCARD,
        feature::ZEROES,
        feature::INDIRECT,
        feature::EVENT_IDX,
    ] {
        ensure!(g.features & wanted != 0, "{wanted:#x}");
    }
    // Nobody would tell us after a reconnect how the guest has set it.
    ensure!(g.features & feature::CONFIG_WCE == 0 && g.config(32, 1)? == [1]);
    ensure!(g.capacity()? == 8 * MIB);
    ensure!(g.request(0, kind::GET_ID, 0, &[(DATA, 20)])? == (OK, 21));
    ensure!(g.memory.bytes(DATA, 4) == b"d\0\0\0");
    ensure!(g.request(0, 99, 0, &[])?.0 == UNSUPP);
    ensure!(g.request(0, kind::FLUSH, 0, &[])? == (OK, 1));
    // A read, and one just beyond the end.
    let end = 8 * MIB / 512;
    ensure!(g.request(0, kind::IN, end - 1, &[(DATA, 512)])? == (OK, 513));
    ensure!(g.memory.bytes(DATA, 512) == &disk[disk.len() - 512..]);
    ensure!(g.request(0, kind::IN, end - 1, &[(DATA, 1024)])?.0 == IOERR);
    ensure!(g.request(0, kind::IN, u64::MAX, &[(DATA, 512)])?.0 == IOERR);
    ensure!(g.request(0, kind::IN, 0, &[(DATA, 100)])?.0 == IOERR);
    // Zeroes, and a discard that must not carry a flag.
    let range = |sector: u64, sectors: u32, flags: u32| {
        let mut raw = sector.to_le_bytes().to_vec();
        raw.extend_from_slice(&sectors.to_le_bytes());
        raw.extend_from_slice(&flags.to_le_bytes());
        raw
    };
    g.memory.bytes(DATA, 16).copy_from_slice(&range(3, 2, 1));
    g.memory
        .bytes(DATA + 16, 16)
        .copy_from_slice(&range(8, 8, 0));
    ensure!(g.request(0, kind::ZEROES, 0, &[(DATA, 32)])?.0 == OK);
    ensure!(g.request(0, kind::DISCARD, 0, &[(DATA, 16)])?.0 == UNSUPP);
    ensure!(g.request(0, kind::DISCARD, 0, &[(DATA + 16, 16)])?.0 == OK);
    ensure!(g.request(0, kind::IN, 0, &[(DATA, 8192)])?.0 == OK);
    let mut want = disk[..8192].to_vec();
    want[1536..2560].fill(0);
    want[4096..].fill(0);
    ensure!(g.memory.bytes(DATA, 8192) == &want[..]);
    Ok(())
}

#[test]
fn a_read_only_disk() -> Result<()> {
    let (hearth, disk) = served(MIB, &["--read-only"])?;
    let mut g = guest(&hearth)?;
    ensure!(g.features & feature::RO != 0 && g.features & feature::DISCARD == 0);
    ensure!(g.request(0, kind::OUT, 0, &[(DATA, 512)])?.0 == IOERR);
    ensure!(g.request(0, kind::IN, 0, &[(DATA, 4096)])?.0 == OK);
    ensure!(g.memory.bytes(DATA, 4096) == &disk[..4096]);
    Ok(())
}

#[test]
fn many_queues_with_and_without_event_indices() -> Result<()> {
    let (hearth, disk) = served(8 * MIB, &[])?;
    for features in [u64::MAX, !feature::EVENT_IDX] {
        let how = How {
            features,
            inflight: features == u64::MAX,
            ..How::default()
        };
        let mut g = Guest::connect(&hearth.vhost_socket("d"), 5, how)?;
        let mut rng = Rng::new(3);
        for round in 0..60u64 {
            // A batch in every queue, one kick each at most, then everything comes back.
            let mut waiting = Vec::new();
            for q in 0..5usize {
                for i in 0..8usize {
                    let sector = rng.below(2 * MIB / 512) * 4;
                    let at = DATA + (q * 8 + i) * 8192 + 512 * (round as usize % 3);
                    let head = g.submit(q, kind::IN, sector, &[(at, 2048)])?;
                    waiting.push((q, head, at, sector as usize * 512));
                }
                g.kick(q)?;
            }
            for (q, ..) in &waiting {
                g.wait_used(*q)?;
            }
            for (q, head, at, from) in waiting {
                ensure!(g.status(q, head) == OK);
                ensure!(g.memory.bytes(at, 2048) == &disk[from..from + 2048]);
            }
        }
        drop(g);
    }
    hearth.logged_times("client connected", 2)?;
    Ok(())
}

#[test]
fn calls_are_made_once_per_batch_and_only_if_wanted() -> Result<()> {
    let (hearth, _) = served(8 * MIB, &[])?;
    let mut g = guest(&hearth)?;
    // The one it gets with the eventfd.
    wait::until("that one", LIMIT, || (g.calls(0) == 1).then_some(()))?;
    // The guest polls: it never moves its event index, so one call at most is made.
    for _ in 0..200 {
        let head = g.submit(0, kind::IN, 0, &[(DATA, 4096)])?;
        g.kick(0)?;
        let used = wait::until("a request is answered", LIMIT, || g.used(0))?;
        ensure!(used.0 == head);
    }
    let calls = g.calls(0);
    ensure!(calls <= 1, "{calls} calls to a guest that wants none");
    Ok(())
}

#[test]
fn indirect_descriptors() -> Result<()> {
    let (hearth, disk) = served(8 * MIB, &[])?;
    let mut g = guest(&hearth)?;
    // A read of 64 KiB into sixteen pages, scattered, with one descriptor of the ring.
    let table = DATA + 0x10_0000;
    let header = DATA + 0x20_0000;
    g.memory.bytes(header, 16).fill(0);
    g.memory.bytes(header + 8, 1)[0] = 16;
    let mut raw = encode(BASE + header as u64, 16, flag::NEXT, 1).to_vec();
    for i in 0..16u64 {
        let page = BASE + DATA as u64 + (i * 7 % 16) * 4096;
        raw.extend_from_slice(&encode(page, 4096, flag::NEXT | flag::WRITE, i as u16 + 2));
    }
    raw.extend_from_slice(&encode(BASE + header as u64 + 100, 1, flag::WRITE, 0));
    g.memory.bytes(table, raw.len()).copy_from_slice(&raw);
    g.memory.bytes(header + 100, 1)[0] = 0xee;
    g.desc(
        0,
        5,
        BASE + table as u64,
        raw.len() as u32,
        flag::INDIRECT,
        0,
    );
    g.offer(0, 5);
    g.kick(0)?;
    ensure!(g.wait_used(0)? == (5, 65537));
    ensure!(g.memory.bytes(header + 100, 1)[0] == OK);
    for i in 0..16usize {
        let at = DATA + (i * 7 % 16) * 4096;
        let from = 8192 + i * 4096;
        ensure!(
            g.memory.bytes(at, 4096) == &disk[from..from + 4096],
            "page {i}"
        );
    }
    Ok(())
}

/// A guest may name a page twice in one read: Windows does with its dummy page, and so does a
/// program that reads a vector with one buffer twice. The last mention counts, and the status
/// byte is written after all data.
#[test]
fn a_read_may_name_a_page_twice() -> Result<()> {
    let (hearth, disk) = served(8 * MIB, &[])?;
    let mut g = guest(&hearth)?;
    let (a, b, long) = (DATA, DATA + 0x1000, 32 << 10);
    for (len, at) in [(4096usize, b), (long, DATA + 0x10000)] {
        let n = len as u32;
        // Longer pieces would be read straight into the guest's memory, one operation each.
        for _ in 0..20 {
            let data = [(a, n), (at, n), (a, n)];
            ensure!(g.request(0, kind::IN, 8, &data)? == (OK, 3 * n + 1));
            ensure!(g.memory.bytes(at, len) == &disk[4096 + len..4096 + 2 * len]);
            ensure!(g.memory.bytes(a, len) == &disk[4096 + 2 * len..4096 + 3 * len]);
        }
    }
    // A piece within another one.
    ensure!(g.request(0, kind::IN, 0, &[(a, 4096), (a + 512, 512)])? == (OK, 4609));
    let mut want = disk[..4096].to_vec();
    want[512..1024].copy_from_slice(&disk[4096..4608]);
    ensure!(g.memory.bytes(a, 4096) == &want[..]);
    // A page full of data with the status byte in its middle.
    let header = DATA + 0x20000;
    g.memory.bytes(header, 16).fill(0);
    g.desc(0, 40, BASE + header as u64, 16, flag::NEXT, 41);
    let both = flag::NEXT | flag::WRITE;
    g.desc(0, 41, BASE + a as u64, 4096, both, 42);
    g.desc(0, 42, BASE + a as u64 + 100, 1, flag::WRITE, 0);
    g.offer(0, 40);
    g.kick(0)?;
    ensure!(g.wait_used(0)? == (40, 4097));
    let mut want = disk[..4096].to_vec();
    want[100] = OK;
    ensure!(g.memory.bytes(a, 4096) == &want[..]);
    ensure!(!hearth.log().contains("cut off"), "{}", hearth.log());
    Ok(())
}

/// Every way of breaking the rules ends that connection, with a reason, and nothing else.
#[test]
fn rule_breakers_are_cut_off() -> Result<()> {
    let (hearth, disk) = served(8 * MIB, &[])?;
    hearth.add("other", path(&hearth.origin("p.img", MIB)?), &[])?;
    let mut bystander = Disk::vhost(&hearth.vhost_socket("other"), 1 << 20)?;
    type Break = fn(&mut Guest) -> Result<()>;
    let breaks: [(&str, Break); 8] = [
        ("not all guest memory", |g| {
            g.desc(0, 0, 64, 16, 0, 0);
            g.offer(0, 0);
            Ok(())
        }),
        ("circle", |g| {
            g.desc(0, 0, BASE + DATA as u64, 16, flag::NEXT, 0);
            g.offer(0, 0);
            Ok(())
        }),
        ("no length", |g| {
            g.submit(0, kind::IN, 0, &[(DATA, 0)]).map(drop)
        }),
        ("is named, but", |g| {
            g.offer(0, SIZE + 3);
            Ok(())
        }),
        ("more than the queue's size", |g| {
            g.show(0, SIZE * 3);
            Ok(())
        }),
        ("status byte", |g| {
            g.desc(0, 0, BASE + DATA as u64, 16, 0, 0);
            g.offer(0, 0);
            Ok(())
        }),
        ("indirect", |g| {
            g.desc(0, 0, BASE + DATA as u64, 40, flag::INDIRECT, 0);
            g.offer(0, 0);
            Ok(())
        }),
        ("invalid message", |g| g.send_raw(&[0xff; 64])),
    ];
    for (reason, act) in breaks {
        let before = hearth.log().len();
        let mut g = guest(&hearth)?;
        ensure!(g.request(0, kind::IN, 0, &[(DATA, 4096)])?.0 == OK);
        act(&mut g)?;
        g.kick_anyway(0)?;
        g.wait_cut().with_context(|| reason.to_owned())?;
        drop(g);
        wait::until("the reason is logged", LIMIT, || {
            let log = hearth.log();
            (log[before..].contains("cut off") && log[before..].contains(reason)).then_some(())
        })
        .with_context(|| format!("{reason}:\n{}", &hearth.log()[before..]))?;
    }
    // Nobody else noticed, and the next client of the same disk finds it in order.
    bystander.read(0, 0, 4096)?;
    let mut g = guest(&hearth)?;
    ensure!(g.request(0, kind::IN, 0, &[(DATA, 4096)])?.0 == OK);
    ensure!(g.memory.bytes(DATA, 4096) == &disk[..4096]);
    ensure!(!hearth.log().contains("panicked"), "{}", hearth.log());
    Ok(())
}

/// A client that cuts its memory short loses its connection; the daemon goes on.
#[test]
fn memory_taken_away_ends_one_connection() -> Result<()> {
    let (mut hearth, disk) = served(8 * MIB, &[])?;
    for round in 0..3 {
        let mut g = guest(&hearth)?;
        ensure!(g.request(0, kind::IN, 0, &[(DATA, 4096)])?.0 == OK);
        match round {
            // The rings go, too.
            0 => {
                g.memory.truncate(0)?;
                g.kick_anyway(0)?;
            }
            // Only the data goes: under a copy, and under a read straight into it.
            _ => {
                let at = DATA + if round == 1 { 512 } else { 0 };
                g.submit(0, kind::IN, 0, &[(at, 4096)])?;
                g.submit(0, kind::OUT, 8, &[(at, 4096)])?;
                g.memory.truncate(DATA as u64)?;
                g.kick_anyway(0)?;
            }
        }
        if round < 2 {
            g.wait_cut()?;
            wait::until("the reason is logged", LIMIT, || {
                hearth.log().contains("took memory away").then_some(())
            })
            .context(hearth.log())?;
        }
        std::mem::forget(g);
        ensure!(hearth.running(), "{}", hearth.log());
        // Its connection ends with our end of the socket in this process; ask over NBD meanwhile.
        let mut other = hearth.connect("d")?;
        ensure!(other.read(0, 4096)? == disk[..4096]);
        if round == 2 {
            break;
        }
    }
    // Flash is not blamed for what a client did.
    ensure!(pool_counter(&hearth, "flash_errors")? == 0);
    Ok(())
}

#[test]
fn a_guest_is_told_of_a_new_size() -> Result<()> {
    let (hearth, _) = served(4 * MIB, &[])?;
    let g = guest(&hearth)?;
    ensure!(g.capacity()? == 4 * MIB);
    std::fs::OpenOptions::new()
        .write(true)
        .open(hearth.dir().join("o.img"))?
        .set_len(6 * MIB)?;
    hearth.ok(&["disk", "set", "d", "--size-from-origin"])?;
    // VHOST_USER_BACKEND_CONFIG_CHANGE_MSG.
    ensure!(g.wait_back()? == 2);
    ensure!(g.capacity()? == 6 * MIB);
    Ok(())
}

/// A completed write survives without a flush if the guest does not know of the write cache, or
/// may have turned it off, which nobody says again after a reconnect.
#[test]
fn writes_are_durable_when_the_cache_may_be_off() -> Result<()> {
    let flushes = |hearth: &Hearth| pool_counter(hearth, "flash_flushes");
    for (features, insist) in [
        (u64::MAX, feature::CONFIG_WCE),
        (!(feature::FLUSH | feature::CONFIG_WCE), 0),
    ] {
        let (mut hearth, _) = served(4 * MIB, &[])?;
        let how = How {
            features,
            insist,
            ..How::default()
        };
        let mut g = Guest::connect(&hearth.vhost_socket("d"), 1, how)?;
        ensure!(g.config(32, 1)? == [0]);
        if insist != 0 {
            // It is heard, and changes nothing.
            g.set_config(32, &[1])?;
            ensure!(g.config(32, 1)? == [0]);
        }
        let before = flushes(&hearth)?;
        g.memory.bytes(DATA, 4096).fill(0x5a);
        ensure!(g.request(0, kind::OUT, 8, &[(DATA, 4096)])?.0 == OK);
        ensure!(flushes(&hearth)? > before, "the write was not made durable");
        hearth.kill9()?;
        hearth.start()?;
        ensure!(hearth.connect("d")?.read(4096, 4096)? == [0x5a; 4096]);
    }
    Ok(())
}

/// kill -9 with requests in flight: the guest reconnects with its in-flight memory, and every
/// request is answered, once, with the right data.
#[test]
fn requests_in_flight_survive_a_kill() -> Result<()> {
    let mut hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", 8 * MIB)?;
    let disk = std::fs::read(&origin)?;
    let slow = format!("model-latency=300ms:{}", path(&origin));
    hearth.add("d", &slow, &["--mode", "write-through"])?;
    let how = How {
        inflight: true,
        ..How::default()
    };
    let mut g = Guest::connect(&hearth.vhost_socket("d"), 1, how)?;
    let mut waiting = Vec::new();
    for i in 0..12usize {
        let at = DATA + i * 4096;
        let sector = 8 * (i as u64 * 5 + 1);
        let write = i % 3 == 0;
        let kind = if write { kind::OUT } else { kind::IN };
        if write {
            g.memory.bytes(at, 4096).fill(i as u8 + 1);
        }
        let head = g.submit(0, kind, sector, &[(at, 4096)])?;
        waiting.push((head, at, sector as usize * 512, write));
    }
    g.kick(0)?;
    wait::until("all are in flight", LIMIT, || {
        (g.memory.noted().ok()? == 12).then_some(())
    })?;
    hearth.kill9()?;
    ensure!(g.used(0).is_none(), "too fast for this test");
    let memory = g.into_memory();
    hearth.start()?;
    let mut g = Guest::resume(&hearth.vhost_socket("d"), memory, how)?;
    let mut heads: Vec<u16> = waiting.iter().map(|w| w.0).collect();
    for _ in 0..waiting.len() {
        let (head, _) = g.wait_used(0)?;
        let at = heads.iter().position(|h| *h == head);
        heads.remove(at.context("a request was answered twice")?);
    }
    ensure!(g.memory.noted()? == 0);
    for (head, at, from, write) in waiting {
        ensure!(g.status(0, head) == OK, "status {}", g.status(0, head));
        if write {
            let value = g.memory.bytes(at, 1)[0];
            ensure!(g.request(0, kind::IN, from as u64 / 512, &[(at, 4096)])?.0 == OK);
            ensure!(g.memory.bytes(at, 4096).iter().all(|b| *b == value));
        } else {
            ensure!(g.memory.bytes(at, 4096) == &disk[from..from + 4096]);
        }
    }
    hearth.logged("taking over requests")?;
    // And it goes on, over a clean restart as well.
    hearth.stop()?;
    let memory = g.into_memory();
    hearth.start()?;
    let mut g = Guest::resume(&hearth.vhost_socket("d"), memory, how)?;
    ensure!(g.request(0, kind::IN, 0, &[(DATA, 4096)])?.0 == OK);
    ensure!(g.memory.bytes(DATA, 4096) == &disk[..4096]);
    Ok(())
}

/// Hypervisors look at the used ring when the connection ends, and stop listening for calls: a
/// clean stop answers everything before that.
#[test]
fn a_stop_answers_before_it_hangs_up() -> Result<()> {
    let mut hearth = Hearth::serving("256M")?;
    let slow = format!(
        "model-latency=300ms:{}",
        path(&hearth.origin("o.img", 8 * MIB)?)
    );
    hearth.add("d", &slow, &["--mode", "write-through"])?;
    let how = How {
        inflight: true,
        ..How::default()
    };
    let mut g = Guest::connect(&hearth.vhost_socket("d"), 1, how)?;
    g.calls(0);
    for i in 0..12usize {
        let kind = if i % 2 == 0 { kind::IN } else { kind::OUT };
        g.submit(0, kind, i as u64 * 8, &[(DATA + i * 4096, 4096)])?;
    }
    g.kick(0)?;
    wait::until("all are in flight", LIMIT, || {
        (g.memory.noted().ok()? == 12).then_some(())
    })?;
    std::thread::scope(|scope| -> Result<()> {
        let stopping = scope.spawn(|| hearth.stop().map(drop));
        g.wait_cut()?;
        let mut answered = 0;
        while g.used(0).is_some() {
            answered += 1;
        }
        ensure!(answered == 12, "only {answered} were answered by then");
        ensure!(g.calls(0) >= 1, "nobody was called");
        stopping
            .join()
            .map_err(|_| anyhow::anyhow!("stopping panicked"))?
    })
}

/// What was answered after the hypervisor stopped looking is not done again, and the guest is
/// called for it.
#[test]
fn answers_of_the_last_life_count() -> Result<()> {
    let (mut hearth, disk) = served(8 * MIB, &[])?;
    let mut how = How {
        inflight: true,
        ..How::default()
    };
    let mut g = Guest::connect(&hearth.vhost_socket("d"), 1, how)?;
    for i in 0..5usize {
        ensure!(g.request(0, kind::IN, i as u64 * 8, &[(DATA, 4096)])?.0 == OK);
    }
    for kill in [true, false] {
        if kill {
            hearth.kill9()?;
        } else {
            hearth.stop()?;
        }
        let memory = g.into_memory();
        hearth.start()?;
        how.behind = 3;
        g = Guest::resume(&hearth.vhost_socket("d"), memory, how)?;
        wait::until("the guest is called", LIMIT, || {
            (g.calls(0) == 1).then_some(())
        })?;
        // The next answer is the next request's: three more would come before it.
        for i in 0..5usize {
            let (status, _) = g.request(0, kind::IN, i as u64 * 8, &[(DATA, 4096)])?;
            ensure!(status == OK);
            ensure!(g.memory.bytes(DATA, 4096) == &disk[i * 4096..(i + 1) * 4096]);
        }
        ensure!(g.used(0).is_none(), "an answer too many");
    }
    Ok(())
}

#[test]
fn a_queue_stops_and_goes_on() -> Result<()> {
    let (hearth, disk) = served(4 * MIB, &[])?;
    let mut g = guest(&hearth)?;
    for round in 0..20u16 {
        let heads: Vec<u16> = (0..4)
            .map(|i| g.submit(0, kind::IN, i * 8, &[(DATA + i as usize * 4096, 4096)]))
            .collect::<Result<_>>()?;
        g.kick(0)?;
        let base = g.stop(0)?;
        // What was taken is answered before the queue has stopped; the rest waits.
        let mut answered = 0;
        while g.used(0).is_some() {
            answered += 1;
        }
        ensure!(
            base == round * 4 + answered,
            "{base} taken, {answered} answered"
        );
        g.start(0)?;
        for _ in answered..4 {
            g.wait_used(0)?;
        }
        for head in heads {
            ensure!(g.status(0, head) == OK);
        }
        ensure!(g.memory.bytes(DATA, 16384) == &disk[..16384]);
    }
    Ok(())
}

#[test]
fn one_client_at_a_time_and_none_of_a_removed_disk() -> Result<()> {
    let (hearth, _) = served(4 * MIB, &[])?;
    let first = guest(&hearth)?;
    let socket = hearth.vhost_socket("d");
    let second = std::thread::spawn(move || Guest::connect(&socket, 1, How::default()));
    wait::until("the second client waits", LIMIT, || {
        hearth
            .log()
            .contains("a second vhost-user client waits")
            .then_some(())
    })?;
    ensure!(!second.is_finished());
    drop(first);
    let second = second
        .join()
        .map_err(|_| anyhow::anyhow!("the second client panicked"))??;
    hearth.ok(&["disk", "remove", "d", "--yes"])?;
    second.wait_cut()?;
    wait::until("the socket is gone", LIMIT, || {
        (!hearth.vhost_socket("d").exists()).then_some(())
    })?;
    Ok(())
}

/// A boot sector that copies sectors 1 to 8 to 16 to 23 so many times, through the BIOS, and
/// leaves QEMU with status 33 (or 35 if the BIOS reports an error).
fn boot_sector(times: u16) -> [u8; 512] {
    const DRIVE: u16 = 0x7df0;
    const COUNT: u16 = 0x7df2;
    const FROM: u16 = 0x7dd0;
    const TO: u16 = 0x7de0;
    fn with(code: &mut Vec<u8>, opcode: &[u8], address: u16) {
        code.extend_from_slice(opcode);
        code.extend_from_slice(&address.to_le_bytes());
    }
    let mut code = Vec::new();
    // xor ax, ax; mov ds, ax; mov ss, ax; mov sp, 0x7c00; mov [drive], dl
    code.extend_from_slice(&[0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0, 0xbc, 0x00, 0x7c]);
    with(&mut code, &[0x88, 0x16], DRIVE);
    let again = code.len();
    let mut fails = Vec::new();
    // mov dl, [drive]; mov si, from; mov ax, 0x4200 (read); int 0x13; jc fail; then the write.
    for (packet, function) in [(FROM, 0x42), (TO, 0x43)] {
        with(&mut code, &[0x8a, 0x16], DRIVE);
        with(&mut code, &[0xbe], packet);
        code.extend_from_slice(&[0xb8, 0x00, function, 0xcd, 0x13, 0x72, 0]);
        fails.push(code.len() - 1);
    }
    // dec word [count]; jnz again
    with(&mut code, &[0xff, 0x0e], COUNT);
    let back = again as i32 - (code.len() as i32 + 2);
    code.extend_from_slice(&[0x75, back as i8 as u8]);
    // mov al, …; out 0xf4, al; jmp $
    code.extend_from_slice(&[0xb0, 16, 0xe6, 0xf4, 0xeb, 0xfe]);
    for at in fails {
        code[at] = (code.len() - at - 1) as u8;
    }
    code.extend_from_slice(&[0xb0, 17, 0xe6, 0xf4, 0xeb, 0xfe]);
    let mut sector = [0u8; 512];
    sector[..code.len()].copy_from_slice(&code);
    for (at, lba) in [(0x1d0, 1u8), (0x1e0, 16)] {
        // A disk address packet: its size, eight sectors, at 0:8000, from this block on.
        let packet = [16, 0, 8, 0, 0x00, 0x80, 0, 0, lba, 0, 0, 0, 0, 0, 0, 0];
        sector[at..at + 16].copy_from_slice(&packet);
    }
    sector[0x1f2..0x1f4].copy_from_slice(&times.to_le_bytes());
    sector[510..].copy_from_slice(&[0x55, 0xaa]);
    sector
}

/// QEMU with the arguments `attach-help` prints boots from the disk, and its guest does not
/// notice that the daemon is killed and started again in the middle.
#[test]
fn qemu_boots_and_survives_a_kill() -> Result<()> {
    if !have("qemu_boots_and_survives_a_kill", &["qemu-system-x86_64"]) {
        return Ok(());
    }
    let mut hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", 8 * MIB)?;
    let mut disk = std::fs::read(&origin)?;
    disk[..512].copy_from_slice(&boot_sector(2000));
    std::fs::write(&origin, &disk)?;
    // Slow enough that requests are in flight whenever the daemon dies.
    let slow = format!("model-latency=1ms:{}", path(&origin));
    hearth.add("d", &slow, &["--mode", "write-through"])?;
    let args = attach_args(&hearth, "d", "vhost-user")?;
    let mut qemu = std::process::Command::new("qemu-system-x86_64")
        .args([
            "-accel",
            "tcg",
            "-display",
            "none",
            "-nodefaults",
            "-m",
            "64M",
        ])
        .args([
            "-no-reboot",
            "-device",
            "isa-debug-exit,iobase=0xf4,iosize=1",
        ])
        .args(args.iter().map(|a| a.replace("size=4G", "size=64M")))
        .stdin(std::process::Stdio::null())
        .spawn()?;
    let reads = |hearth: &Hearth| {
        let count = |name| hearth.counter("d", name).unwrap_or(0);
        count("read_hits") + count("read_misses")
    };
    let outcome = (|| {
        wait::until("the guest reads and writes", LIMIT, || {
            (reads(&hearth) > 200).then_some(())
        })?;
        hearth.kill9()?;
        hearth.start()?;
        wait::until("the guest goes on", LIMIT, || {
            (reads(&hearth) > 20).then_some(())
        })?;
        wait::until("the guest is done", Duration::from_secs(120), || {
            qemu.try_wait().ok().flatten()
        })
    })();
    if outcome.is_err() {
        qemu.kill()?;
        qemu.wait()?;
    }
    let status = outcome.with_context(|| hearth.log())?;
    ensure!(status.code() == Some(33), "QEMU ended with {status}");
    ensure!(!hearth.log().contains("cut off"), "{}", hearth.log());
    ensure!(hearth.connect("d")?.read(8192, 4096)? == disk[512..4608]);
    Ok(())
}

/// A guest that writes its buffers while they are used gets what it deserves, but what is cached
/// stays right, flash is not blamed, and nothing counts as lost.
#[test]
fn scribbling_over_buffers_harms_nobody_else() -> Result<()> {
    let (hearth, mut disk) = served(8 * MIB, &["--seq-cutoff", "0"])?;
    let mut g = guest(&hearth)?;
    // Some blocks are only on flash.
    g.memory.bytes(DATA, 1 << 20).fill(0x77);
    ensure!(g.request(0, kind::OUT, 0, &[(DATA, 1 << 20)])?.0 == OK);
    disk[..1 << 20].fill(0x77);
    let scratch = DATA + (2 << 20);
    let at = g.memory.bytes(scratch, 4096).as_mut_ptr().addr();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<()> {
        let scribbler = scope.spawn(|| {
            let page = at as *mut u64;
            let mut n = 0u64;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                n += 1;
                for i in 0..512 {
                    // SAFETY: one page of the guest's memory, which lives until the scope ends.
                    unsafe { page.add(i).write_volatile(n) };
                }
            }
        });
        let outcome = (|| {
            // Dirty blocks, and blocks that are cached by this very read, twice each.
            for pass in 0..2 {
                for block in (0..256).chain(1024..1536) {
                    let sector = block * 8;
                    let (status, _) = g.request(0, kind::IN, sector, &[(scratch, 4096)])?;
                    ensure!(status == OK, "pass {pass}, block {block}");
                }
            }
            for block in 256..512 {
                let (status, _) = g.request(0, kind::OUT, block * 8, &[(scratch, 4096)])?;
                ensure!(status == OK, "write of block {block}");
            }
            g.request(0, kind::FLUSH, 0, &[]).map(drop)
        })();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        scribbler
            .join()
            .map_err(|_| anyhow::anyhow!("the scribbler panicked"))?;
        outcome
    })?;
    let mut client = hearth.connect("d")?;
    for block in (0..256u64).chain(1024..1536) {
        let from = block as usize * 4096;
        ensure!(
            client.read(block * 4096, 4096)? == disk[from..from + 4096],
            "block {block} is not what it should be"
        );
    }
    for block in 256..512u64 {
        let first = client.read(block * 4096, 4096)?;
        ensure!(client.read(block * 4096, 4096)? == first);
    }
    for counter in ["bad_clean_blocks", "bad_dirty_blocks"] {
        ensure!(hearth.counter("d", counter)? == 0, "{counter}");
    }
    Ok(())
}

/// Polling changes nothing but speed, and an idle daemon that may poll does not.
#[test]
fn polling_ends_when_the_guest_is_idle() -> Result<()> {
    let mut hearth = Hearth::with_pool("256M")?;
    hearth.serve_args = vec!["--poll".into(), "200".into()];
    hearth.start()?;
    let origin = hearth.origin("o.img", 8 * MIB)?;
    hearth.add("d", path(&origin), &[])?;
    let disk = std::fs::read(&origin)?;
    let mut g = guest(&hearth)?;
    for round in 0..4000u64 {
        let block = round * 37 % 1024;
        let (status, _) = g.request(0, kind::IN, block * 8, &[(DATA, 4096)])?;
        ensure!(status == OK);
        let from = block as usize * 4096;
        ensure!(g.memory.bytes(DATA, 4096) == &disk[from..from + 4096]);
    }
    let pid = hearth.pid().context("no daemon")?;
    // A thread that polls for ever would use all of the time; background work some of it.
    let mut since = (Instant::now(), cpu_ticks(pid).context("no times")?);
    wait::until("the daemon sleeps", LIMIT, || {
        if since.0.elapsed() < Duration::from_millis(500) {
            return None;
        }
        let now = (Instant::now(), cpu_ticks(pid)?);
        let used = now.1 - std::mem::replace(&mut since, now).1;
        (used < 10).then_some(())
    })
}

/// Processor time of a process, in hundredths of a second.
fn cpu_ticks(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit(')').next()?.split_whitespace().skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}
