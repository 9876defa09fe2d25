//! The life of a disk through the command line: added, used, changed, flushed, removed; and of
//! the daemon: stopped, killed, started again.

use crate::common;
use crate::common::{Bench, content, one_sentence, outlive_refused_writes, text, until};
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};

const MIB: usize = 1 << 20;

#[test]
fn a_disk_from_add_to_remove() {
    let bench = Bench::serving();
    let origin = bench.origin("o.img", 8 * MIB + 700, 1);
    let added = bench.json(&[
        "disk",
        "add",
        "vm",
        "--origin",
        &origin,
        "--block-size",
        "16K",
        "--max",
        "32M",
    ]);
    assert_eq!(added["state"], "attached");
    assert_eq!(added["size"], 8 * MIB + 700);
    assert!(bench.ok(&["disk", "list"]).contains("write-back"));

    let mut client = bench.connect("vm").unwrap();
    assert_eq!(client.size as usize, 8 * MIB + 700);
    assert_eq!(
        client.read(4096, 65536),
        content(8 * MIB, 1)[4096..4096 + 65536]
    );
    client.write(MIB as u64, &[7; 12288]);
    client.flush();
    assert!(bench.disk("vm")["connections"] == 1);

    let stats = bench.json(&["stats", "vm"]);
    assert_eq!(stats["spans"][0]["span"], "total");
    assert_eq!(stats["spans"][0]["counters"]["write_bytes"], 12288);
    assert!(stats["spans"].as_array().unwrap().len() == 4);
    assert!(bench.ok(&["stats"]).contains("vm"));

    let set = bench.json(&[
        "disk",
        "set",
        "vm",
        "--mode",
        "write-through",
        "--min",
        "1M",
        "--seq-cutoff",
        "0",
    ]);
    assert_eq!(
        (set["mode"].as_str(), set["min"].as_u64()),
        (Some("write-through"), Some(MIB as u64))
    );
    bench.ok(&["disk", "flush", "vm"]);
    assert_eq!(
        std::fs::read(&origin).unwrap()[MIB..MIB + 12288],
        [7; 12288]
    );
    assert_eq!(bench.disk("vm")["dirty"], 0);
    drop(client);
    bench.ok(&["disk", "remove", "vm"]);
    assert!(bench.ok(&["disk", "list"]).contains("no disks"));
    assert!(bench.connect("vm").is_none());
    // Its name and its origin are free again.
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    assert_eq!(
        bench.connect("vm").unwrap().read(MIB as u64, 4096),
        [7; 4096]
    );
}

#[test]
fn warm_after_a_clean_stop() {
    let mut bench = Bench::with_pool();
    let state = |bench: &Bench| {
        let flash = bench.path("flash");
        bench.json(&["pool", "show", "--flash", &flash])["state"].clone()
    };
    assert_eq!(state(&bench), "new");
    bench.start();
    assert_eq!(state(&bench), "dirty");
    let origin = bench.origin("o.img", 4 * MIB, 2);
    bench.ok(&[
        "disk",
        "add",
        "vm",
        "--origin",
        &origin,
        "--seq-cutoff",
        "0",
    ]);
    let mut client = bench.connect("vm").unwrap();
    // Admission may want to see a block more than once.
    let cached = until("blocks are cached", || {
        client.read(0, MIB);
        bench.disk("vm")["cached"]
            .as_u64()
            .filter(|c| *c >= MIB as u64)
    });
    bench.stop();
    assert!(
        !bench.run_dir().join("nbd.sock").exists() && !bench.run_dir().join("api.sock").exists()
    );
    let (flash, state) = (bench.path("flash"), bench.path("state"));
    let shown = bench.json(&["pool", "show", "--flash", &flash, "--state-dir", &state]);
    assert_eq!(shown["state"], "clean");
    assert_eq!(shown["disks"][0]["origin_found"], true);
    bench.start();
    assert!(bench.disk("vm")["cached"].as_u64() >= Some(cached));
    assert!(
        bench.json(&["pool", "show"])["recovery"]["how"]
            .as_str()
            .unwrap()
            .contains("checkpoint")
    );
    assert_eq!(bench.connect("vm").unwrap().read(0, MIB), content(MIB, 2));
    assert!(bench.json(&["stats", "vm"])["spans"][0]["counters"]["read_hits"].as_u64() > Some(0));
}

#[test]
fn a_stop_lets_go_of_every_origin() {
    let mut bench = Bench::serving();
    for name in ["a", "b"] {
        let origin = bench.origin(&format!("{name}.img"), MIB, 2);
        bench.ok(&["disk", "add", name, "--origin", &origin]);
    }
    bench.stop();
    bench.start();
    bench.ok(&["pool", "export"]);
    assert!(bench.wait_end().success());
    let log = bench.log();
    assert!(!log.contains("still being used"), "{log}");
}

#[test]
fn flushed_writes_outlive_a_kill() {
    let mut bench = Bench::serving();
    let origin = bench.origin("o.img", 4 * MIB, 3);
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    let mut client = bench.connect("vm").unwrap();
    client.write(8192, &[9; 8192]);
    client.flush();
    bench.kill();
    bench.start();
    assert_eq!(bench.disk("vm")["state"], "attached");
    assert_eq!(bench.connect("vm").unwrap().read(8192, 8192), [9; 8192]);
}

#[test]
fn flush_can_be_called_off() {
    let bench = Bench::serving();
    let origin = bench.origin("o.img", 8 * MIB, 4);
    // Every origin write takes two seconds: nothing is done before we call it off.
    bench.ok(&[
        "disk",
        "add",
        "vm",
        "--origin",
        &format!("model-latency=2s:{origin}"),
    ]);
    let mut client = bench.connect("vm").unwrap();
    for i in 0..64 {
        client.write(i * 131_072, &[5; 4096]);
    }
    client.flush();
    let child = bench
        .command(&["disk", "flush", "vm", "--json"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    until("the flush is going on", || {
        (bench.disk("vm")["state"] == "flushing").then_some(())
    });
    // SAFETY: a signal to a child that has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGINT) };
    let out = child.wait_with_output().unwrap();
    assert_eq!(
        out.status.code(),
        Some(130),
        "{}",
        common::text(&out.stderr)
    );
    let said: serde_json::Value = serde_json::from_slice(&out.stderr).unwrap();
    assert!(
        said["error"].as_str().unwrap().contains("nothing is lost"),
        "{said}"
    );
    assert_eq!(bench.disk("vm")["state"], "attached");
    assert_eq!(client.read(0, 4096), [5; 4096]);
}

/// Passes connections on from `from` to `to`, and sends SIGINT to `child` before the answer to an
/// order to flush.
fn interrupt_at_the_order(from: &Path, to: &Path, child: mpsc::Receiver<i32>) {
    let listener = UnixListener::bind(from).unwrap();
    let (to, child) = (to.to_owned(), Arc::new(Mutex::new(child)));
    std::thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), UnixStream::connect(&to).unwrap());
            let ends = (client.try_clone().unwrap(), server.try_clone().unwrap());
            let ordered = Arc::new(AtomicBool::new(false));
            let (seen, child) = (ordered.clone(), child.clone());
            std::thread::spawn(move || {
                pass_on(ends.0, ends.1, |bytes| {
                    seen.fetch_or(text(bytes).contains("/flush "), Ordering::SeqCst);
                });
            });
            std::thread::spawn(move || {
                pass_on(server, client, |_| {
                    if ordered.swap(false, Ordering::SeqCst) {
                        let child = child.lock().unwrap().recv().unwrap();
                        // SAFETY: a signal to a child that has not been waited for.
                        unsafe { libc::kill(child, libc::SIGINT) };
                    }
                });
            });
        }
    });
}

/// Copies what `from` says to `to` until one of them is gone; `first` sees it before `to` does.
fn pass_on(mut from: UnixStream, mut to: UnixStream, first: impl Fn(&[u8])) {
    let mut bytes = [0; 65536];
    while let Ok(n @ 1..) = from.read(&mut bytes) {
        first(&bytes[..n]);
        if to.write_all(&bytes[..n]).is_err() {
            return;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

#[test]
fn a_flush_is_called_off_though_its_order_was_not_answered_yet() {
    let bench = Bench::serving();
    let origin = bench.origin("o.img", 8 * MIB, 4);
    let slow = format!("model-latency=2s:{origin}");
    bench.ok(&["disk", "add", "vm", "--origin", &slow]);
    let mut client = bench.connect("vm").unwrap();
    client.write(0, &[5; 4096]);
    let between = bench.path("between");
    std::fs::create_dir(&between).unwrap();
    let (tell, child_id) = mpsc::channel();
    interrupt_at_the_order(
        &Path::new(&between).join("api.sock"),
        &bench.run_dir().join("api.sock"),
        child_id,
    );
    let child = Command::new(env!("CARGO_BIN_EXE_hearth"))
        .args(["--run-dir", &between, "disk", "flush", "vm", "--json"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    tell.send(child.id() as i32).unwrap();
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(130), "{}", text(&out.stderr));
    assert_eq!(bench.disk("vm")["state"], "attached");
}

#[test]
fn dirty_data_is_thrown_away_only_when_told_twice() {
    let bench = Bench::serving();
    let origin = bench.origin("o.img", 4 * MIB, 5);
    bench.ok(&[
        "disk",
        "add",
        "vm",
        "--origin",
        &format!("model-latency=2s:{origin}"),
    ]);
    let mut client = bench.connect("vm").unwrap();
    client.write(0, &[1; 4096]);
    client.flush();
    drop(client);
    assert!(
        bench
            .refused(&["disk", "remove", "vm", "--discard-dirty"])
            .contains("--yes")
    );
    bench.ok(&["disk", "remove", "vm", "--discard-dirty", "--yes"]);
    assert!(bench.ok(&["disk", "list"]).contains("no disks"));
}

#[test]
fn what_is_dirty_is_the_same_wherever_it_is_shown() {
    let bench = Bench::serving();
    let origin = format!("fault=eio-write:{}", bench.origin("o.img", 4 * MIB, 12));
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    let mut client = bench.connect("vm").unwrap();
    client.zero(0, MIB as u32);
    client.flush();
    let stats = bench.json(&["stats"]);
    assert_eq!(bench.disk("vm")["dirty"], MIB);
    assert_eq!(stats["disks"][0]["dirty"], MIB);
    assert_eq!(stats["pool"]["dirty"], MIB);
    assert_eq!(bench.json(&["pool", "show"])["dirty"], MIB);
    assert!(stats["disks"][0]["dirty_for"].as_f64() > Some(0.0));
    client.write(2 * MIB as u64, &[1; 4096]);
    client.flush();
    assert_eq!(bench.json(&["stats", "vm"])["dirty"], MIB + 4096);
    assert_eq!(bench.json(&["pool", "show"])["dirty"], MIB + 4096);
}

#[test]
fn what_is_dirty_is_told_without_a_daemon() {
    let mut bench = Bench::serving();
    let flash = bench.path("flash");
    let show = ["pool", "show", "--flash", &flash];
    let origin = format!("fault=eio-write:{}", bench.origin("o.img", 8 * MIB, 13));
    let clean = bench.origin("clean.img", MIB, 14);
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    bench.ok(&["disk", "add", "clean", "--origin", &clean]);
    let mut client = bench.connect("vm").unwrap();
    // Several segments of the log, of which the later ones tell that the first is durable.
    for i in 0..3 {
        client.write(i * MIB as u64, &[5; MIB]);
        client.flush();
    }
    client.zero(4 * MIB as u64, 4096);
    client.flush();
    let used = bench.json(&show);
    assert!(used["dirty"].is_null(), "{used}");
    assert!(used["unknown"].as_str().unwrap().contains("in use"));
    bench.refused(&["pool", "import", "--flash", &flash]);
    for clean_stop in [false, true] {
        if clean_stop {
            bench.start();
            bench.stop();
        } else {
            bench.kill();
        }
        let before = std::fs::read(&flash).unwrap();
        let shown = bench.json(&show);
        let imported = bench.json(&["pool", "import", "--flash", &flash]);
        assert!(std::fs::read(&flash).unwrap() == before, "it was written");
        for pool in [shown, imported] {
            assert_eq!(pool["dirty"], 3 * MIB + 4096, "{pool}");
            assert_eq!(pool["disks"][0]["dirty"], 3 * MIB + 4096);
            assert_eq!(pool["disks"][0]["cached"], 3 * MIB);
            assert_eq!(pool["disks"][1]["dirty"], 0);
        }
        assert!(bench.ok(&show).contains("3.0 MiB"), "{}", bench.ok(&show));
    }
    bench.start();
    bench.kill();
    let mut damaged = std::fs::read(&flash).unwrap();
    let first = damaged.chunks(4096).position(|b| b.starts_with(b"HBAT"));
    // A whole segment: of a batch alone, the segment's summary would do.
    damaged[first.unwrap() * 4096..][..MIB].fill(0);
    std::fs::write(&flash, damaged).unwrap();
    let shown = bench.json(&show);
    assert!(shown["dirty"].is_null(), "{shown}");
    assert!(shown["unknown"].as_str().unwrap().contains("damaged"));
    assert!(bench.ok(&show).contains("damaged"));
}

#[test]
fn an_origin_that_comes_back_is_attached() {
    let mut bench = Bench::serving();
    let (here, there) = (bench.origin("o.img", 2 * MIB, 6), bench.path("away.img"));
    let other = bench.origin("other.img", MIB, 7);
    bench.ok(&["disk", "add", "vm", "--origin", &here]);
    bench.ok(&["disk", "add", "other", "--origin", &other]);
    let mut client = bench.connect("vm").unwrap();
    client.write(0, &[3; 4096]);
    client.flush();
    bench.kill();
    std::fs::rename(&here, &there).unwrap();
    bench.start();
    let disk = bench.disk("vm");
    assert_eq!(disk["state"], "waiting", "{disk}");
    assert!(disk["reason"].as_str().unwrap().contains("o.img"), "{disk}");
    assert_eq!(bench.disk("other")["state"], "attached");
    assert!(
        bench
            .refused(&["disk", "remove", "vm"])
            .contains("only on flash")
    );
    std::fs::rename(&there, &here).unwrap();
    // Renaming changes the inode's ctime: somebody has to say that it is the same origin.
    let state = until("the origin is found", || {
        let state = bench.disk("vm")["state"].as_str().unwrap().to_owned();
        (state != "waiting").then_some(state)
    });
    if state == "refused" {
        bench.ok(&["disk", "set", "vm", "--trust", "flash"]);
    }
    assert_eq!(bench.connect("vm").unwrap().read(0, 4096), [3; 4096]);
}

#[test]
fn export_leaves_nothing_on_flash_only() {
    let mut bench = Bench::serving();
    let origin = bench.origin("o.img", 2 * MIB, 8);
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    let mut client = bench.connect("vm").unwrap();
    client.write(4096, &[8; 4096]);
    drop(client);
    bench.ok(&["pool", "export"]);
    assert!(bench.wait_end().success());
    assert_eq!(std::fs::read(&origin).unwrap()[4096..8192], [8; 4096]);
    let flash = bench.path("flash");
    bench.ok(&["pool", "import", "--flash", &flash]);
    bench.ok(&["pool", "export", "--flash", &flash]);
    bench.start();
    assert_eq!(bench.disk("vm")["state"], "attached");
    let words = bench.refused(&["pool", "export", "--flash", &flash]);
    assert!(words.contains("in use"), "{words}");
}

#[test]
fn growing_and_watching() {
    let bench = Bench::serving();
    let origin = bench.origin("o.img", 2 * MIB, 9);
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    std::fs::OpenOptions::new()
        .write(true)
        .open(&origin)
        .unwrap()
        .set_len(3 * MIB as u64)
        .unwrap();
    bench.ok(&["disk", "set", "vm", "--size-from-origin"]);
    assert_eq!(bench.connect("vm").unwrap().size as usize, 3 * MIB);
    std::fs::OpenOptions::new()
        .write(true)
        .open(&origin)
        .unwrap()
        .set_len(MIB as u64)
        .unwrap();
    assert!(
        bench
            .refused(&["disk", "set", "vm", "--size-from-origin"])
            .contains("shrank")
    );

    let child = bench
        .command(&["stats", "--watch"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // SAFETY: a signal to a child that has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    let _ = child.wait_with_output().unwrap();
}

#[test]
fn a_second_signal_does_not_wait() {
    let mut bench = Bench::serving();
    let origin = bench.origin("o.img", 2 * MIB, 10);
    bench.ok(&[
        "disk",
        "add",
        "vm",
        "--origin",
        &format!("model-latency=20s:{origin}"),
        "--mode",
        "write-through",
    ]);
    let socket = bench.run_dir().join("nbd.sock");
    let writer = std::thread::spawn(move || {
        let mut client = common::Nbd::connect(&socket, "vm").unwrap();
        // Ends with an error when the daemon does.
        let _ =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| client.write(0, &[1; 4096])));
    });
    until("the write is waiting", || {
        (bench.disk("vm")["connections"] == 1).then_some(())
    });
    bench.signal(libc::SIGTERM);
    until("the daemon is stopping", || {
        bench.log().contains("stopping").then_some(())
    });
    bench.signal(libc::SIGTERM);
    assert_eq!(bench.wait_end().code(), Some(128 + libc::SIGTERM));
    writer.join().unwrap();
}

#[test]
fn two_daemons() {
    let bench = Bench::serving();
    assert!(bench.start_refused().contains("another hearth daemon"));
    let flash = bench.path("flash");
    let elsewhere = bench.path("r2");
    let out = bench.run(&[
        "serve",
        "--flash",
        &flash,
        "--run-dir",
        &elsewhere,
        "--log",
        "off",
    ]);
    assert!(one_sentence(&out, 1).contains("in use"));
}

#[test]
fn the_service_manager_is_told() {
    let bench = Bench::with_pool();
    let path = bench.path("notify");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).unwrap();
    socket
        .set_read_timeout(Some(std::time::Duration::from_secs(60)))
        .unwrap();
    let flash = bench.path("flash");
    let log = std::fs::File::create(bench.path("log")).unwrap();
    let mut child = bench
        .command(&["serve", "--flash", &flash, "--log-format", "json"])
        .env("NOTIFY_SOCKET", &path)
        .env("WATCHDOG_USEC", "400000")
        .env_remove("WATCHDOG_PID")
        .stderr(log)
        .spawn()
        .unwrap();
    let next = || {
        let mut message = [0u8; 256];
        let n = socket
            .recv(&mut message)
            .expect("the daemon says something");
        common::text(&message[..n])
    };
    assert!(next().starts_with("READY=1"));
    assert_eq!(next(), "WATCHDOG=1");
    // SAFETY: a signal to a child that has not been waited for.
    unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    while next() != "STOPPING=1" {}
    assert!(until("the daemon ends", || child.try_wait().unwrap()).success());
    for line in bench.log().lines() {
        let entry: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(
            entry["level"].is_string() && entry["fields"]["message"].is_string(),
            "{line}"
        );
    }
}

#[test]
fn nobody_knows_which_side_wins_but_the_owner() {
    for (side, expected) in [("flash", 1u8), ("origin", 2)] {
        let mut bench = Bench::serving();
        let origin = bench.origin("o.img", 4 * MIB, 11);
        bench.ok(&[
            "disk",
            "add",
            "vm",
            "--origin",
            &format!("model-latency=500ms:{origin}"),
        ]);
        let mut client = bench.connect("vm").unwrap();
        client.write(MIB as u64, &[1; 4096]);
        client.flush();
        bench.kill();
        let mut changed = content(4 * MIB, 11);
        changed[MIB..MIB + 4096].fill(2);
        std::fs::write(&origin, &changed).unwrap();
        bench.start();
        let disk = bench.disk("vm");
        assert_eq!(disk["state"], "refused");
        assert!(
            disk["remedy"].as_str().unwrap().contains("--trust flash"),
            "{disk}"
        );
        // Asking again does not wear the question out.
        bench.kill();
        bench.start();
        assert_eq!(bench.disk("vm")["state"], "refused");
        assert!(bench.refused(&["disk", "flush", "vm"]).contains("--trust"));
        let set = bench.json(&["disk", "set", "vm", "--trust", side]);
        assert_eq!(set["state"], "attached", "{set}");
        assert_eq!(
            bench.connect("vm").unwrap().read(MIB as u64, 4096),
            [expected; 4096]
        );
        bench.ok(&["disk", "flush", "vm"]);
        assert_eq!(
            std::fs::read(&origin).unwrap()[MIB..MIB + 4096],
            [expected; 4096]
        );
    }
}

#[test]
fn after_a_failure_of_the_flash_it_is_said_which_side_is_likely_right() {
    outlive_refused_writes();
    let mut bench = Bench::serving();
    let origin = bench.origin("o.img", MIB, 15);
    // So slow that nothing of the first write is in the origin when the flash fails.
    let origin = format!("model-latency=300ms:{origin}");
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    let mut client = bench.connect("vm").unwrap();
    client.write(0, &[1; 65536]);
    client.flush();
    // The superblock can be written, the log cannot.
    bench.refuse_writes(2 * MIB as u64);
    until("the flash has failed", || {
        client.write(0, &[2; 4096]);
        (bench.json(&["pool", "show"])["state"] == "failed").then_some(())
    });
    bench.ok(&["disk", "flush", "vm"]);
    assert_eq!(bench.disk("vm")["dirty"], 0);
    bench.kill();
    bench.start();
    let disk = bench.disk("vm");
    assert_eq!(disk["state"], "refused", "{disk}");
    let remedy = disk["remedy"].as_str().unwrap();
    assert!(remedy.contains("flash failed while serving"), "{disk}");
    bench.ok(&["disk", "set", "vm", "--trust", "origin"]);
    let mut client = bench.connect("vm").unwrap();
    assert_eq!(client.read(0, 4096), [2; 4096]);
    assert_eq!(client.read(4096, 4096), [1; 4096]);
}
