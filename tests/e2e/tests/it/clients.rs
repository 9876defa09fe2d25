//! Other people's NBD clients against a real daemon, in every cache mode where it matters.

use anyhow::{Result, ensure};
use hearth_rig::clients::{have, have_python_nbd, python_nbd, run, run_ok};
use hearth_rig::daemon::path;
use hearth_rig::nbd::{Client, Command};
use hearth_rig::{Hearth, rng::Rng};
use serde_json::Value;

const MIB: u64 = 1 << 20;
const MODES: [&str; 4] = ["write-back", "write-through", "write-around", "off"];

/// A disk that is removed lets go of its clients, also of one that asks for nothing, and then of
/// its origin.
#[test]
fn a_removed_disk_keeps_no_client() -> Result<()> {
    let hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", 4 * MIB)?;
    hearth.add("vm1", path(&origin), &[])?;
    let mut idle = hearth.connect("vm1")?;
    idle.write(0, &[7; 4096])?;
    hearth.ok(&["disk", "remove", "vm1", "--yes"])?;
    let end = idle.receive().map(drop).map_err(|e| e.kind());
    ensure!(end == Err(std::io::ErrorKind::UnexpectedEof), "{end:?}");
    ensure!(
        !hearth.log().contains("is still being used"),
        "{}",
        hearth.log()
    );
    // Nobody holds it any more, so that it can be had again at once.
    hearth.add("vm2", path(&origin), &[])?;
    // What it wrote is no part of "all disks" any more.
    let stats: Value = serde_json::from_str(&hearth.ok(&["stats", "--json"])?)?;
    for span in stats["pool"]["disks"].as_array().into_iter().flatten() {
        ensure!(span["counters"]["write_bytes"] == 0, "{span}");
    }
    ensure!(hearth.connect("vm2")?.read(0, 4096)? == [7; 4096]);
    Ok(())
}

/// What libnbd's nbdinfo says of the export is what the protocol page promises.
#[test]
fn nbdinfo_sees_what_is_promised() -> Result<()> {
    if !have("nbdinfo", &["nbdinfo"]) {
        return Ok(());
    }
    let hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", 64 * MIB + 512)?;
    hearth.add("vm1", path(&origin), &[])?;
    let second = hearth.origin("p.img", 8 * MIB)?;
    hearth.add("vm2", path(&second), &["--read-only"])?;
    let info: Value = serde_json::from_str(&run_ok(
        "nbdinfo",
        &["--json", &hearth.uri("vm1")],
        hearth.dir(),
    )?)?;
    let export = &info["exports"][0];
    ensure!(
        info["protocol"] == "newstyle-fixed" && info["structured"] == true,
        "{info}"
    );
    ensure!(export["export-size"] == 64 * MIB + 512, "{export}");
    for can in [
        "can_cache",
        "can_df",
        "can_fast_zero",
        "can_flush",
        "can_fua",
        "can_multi_conn",
        "can_trim",
        "can_zero",
    ] {
        ensure!(export[can] == true, "{can}: {export}");
    }
    ensure!(
        export["is_read_only"] == false && export["contexts"][0] == "base:allocation",
        "{export}"
    );
    if let Some(minimum) = export["block_minimum"].as_u64() {
        let sizes = (
            minimum,
            export["block_preferred"].as_u64(),
            export["block_maximum"].as_u64(),
        );
        ensure!(
            matches!(sizes, (1 | 512, Some(4096), Some(max)) if max == 32 * MIB),
            "block sizes {sizes:?}"
        );
    }
    let list: Value = serde_json::from_str(&run_ok(
        "nbdinfo",
        &[
            "--list",
            "--json",
            &format!("nbd+unix:///?socket={}", path(&hearth.socket())),
        ],
        hearth.dir(),
    )?)?;
    let mut names = list["exports"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|e| e["export-name"].as_str())
        .collect::<Vec<_>>();
    names.sort_unstable();
    ensure!(names == ["vm1", "vm2"], "{list}");
    let read_only: Value = serde_json::from_str(&run_ok(
        "nbdinfo",
        &["--json", &hearth.uri("vm2")],
        hearth.dir(),
    )?)?;
    ensure!(
        read_only["exports"][0]["is_read_only"] == true,
        "{read_only}"
    );
    Ok(())
}

/// qemu-img copies an image in, compares it, and finds it again in the origin once it is flushed.
#[test]
fn qemu_img_round_trip() -> Result<()> {
    if !have("qemu-img", &["qemu-img"]) {
        return Ok(());
    }
    for mode in MODES {
        let hearth = Hearth::serving("256M")?;
        let origin = hearth.dir().join("o.img");
        std::fs::File::create(&origin)?.set_len(64 * MIB)?;
        hearth.add("d", path(&origin), &["--mode", mode])?;
        let image = hearth.origin("image.raw", 64 * MIB)?;
        let uri = hearth.uri("d");
        run_ok(
            "qemu-img",
            &[
                "convert",
                "-n",
                "-f",
                "raw",
                "-O",
                "raw",
                path(&image),
                &uri,
            ],
            hearth.dir(),
        )?;
        run_ok(
            "qemu-img",
            &["compare", "-f", "raw", "-F", "raw", path(&image), &uri],
            hearth.dir(),
        )?;
        run_ok(
            "qemu-img",
            &["convert", "-f", "raw", "-O", "raw", &uri, "back.raw"],
            hearth.dir(),
        )?;
        run_ok("cmp", &[path(&image), "back.raw"], hearth.dir())?;
        hearth.ok(&["disk", "flush", "d"])?;
        run_ok("cmp", &[path(&image), path(&origin)], hearth.dir())?;
    }
    Ok(())
}

/// nbdcopy, several connections at once, both ways, and an origin of odd size.
#[test]
fn nbdcopy_both_ways() -> Result<()> {
    if !have("nbdcopy", &["nbdcopy"]) {
        return Ok(());
    }
    for mode in ["write-back", "write-around"] {
        let size = 48 * MIB + 512 * 3;
        let hearth = Hearth::serving("256M")?;
        let origin = hearth.dir().join("o.img");
        std::fs::File::create(&origin)?.set_len(size)?;
        hearth.add("d", path(&origin), &["--mode", mode])?;
        let image = hearth.origin("image.raw", size)?;
        run_ok(
            "nbdcopy",
            &["--flush", "--connections=4", path(&image), &hearth.uri("d")],
            hearth.dir(),
        )?;
        run_ok(
            "nbdcopy",
            &["--connections=4", &hearth.uri("d"), "back.raw"],
            hearth.dir(),
        )?;
        run_ok("cmp", &[path(&image), "back.raw"], hearth.dir())?;
        hearth.ok(&["disk", "remove", "d"])?;
        run_ok("cmp", &[path(&image), path(&origin)], hearth.dir())?;
    }
    Ok(())
}

/// qemu-io: patterns at odd places, zeroes, discards, FUA.
#[test]
fn qemu_io_patterns() -> Result<()> {
    if !have("qemu-io", &["qemu-io"]) {
        return Ok(());
    }
    for mode in MODES {
        let hearth = Hearth::serving("256M")?;
        let origin = hearth.origin("o.img", 32 * MIB)?;
        hearth.add("d", path(&origin), &["--mode", mode])?;
        let commands = [
            "write -P 0x11 0 1M",
            "write -P 0x22 512 512",
            "write -P 0x33 4095 2",
            "write -f -P 0x44 100000 70000",
            "write -z 200704 8192",
            "write -z -u 262144 65536",
            "discard 327680 65536",
            "aio_write -P 0x55 8M 1M",
            "aio_write -P 0x66 9M 1M",
            "aio_flush",
            "read -P 0x11 0 512",
            "read -P 0x22 512 512",
            "read -P 0x11 1024 3071",
            "read -P 0x33 4095 2",
            "read -P 0x44 100000 70000",
            "read -P 0 200704 8192",
            "read -P 0 262144 65536",
            "read -P 0 327680 65536",
            "read -P 0x55 8M 1M",
            "read -P 0x66 9M 1M",
            "flush",
        ];
        let uri = hearth.uri("d");
        let mut args = vec!["-f", "raw"];
        commands.iter().for_each(|c| args.extend(["-c", c]));
        args.push(&uri);
        let out = run_ok("qemu-io", &args, hearth.dir())?;
        ensure!(!out.contains("verification failed"), "{mode}: {out}");
        hearth.ok(&["disk", "flush", "d"])?;
        let origin_args = [
            // To write what Hearth serves, QEMU is refused.
            "-r",
            "-f",
            "raw",
            "-c",
            "read -P 0x44 100000 70000",
            "-c",
            "read -P 0 262144 65536",
            path(&origin),
        ];
        let out = run_ok("qemu-io", &origin_args, hearth.dir())?;
        ensure!(
            !out.contains("verification failed"),
            "{mode}, origin: {out}"
        );
    }
    Ok(())
}

/// Zeros written without leave to unmap keep their space on the origin; with it they need not.
#[test]
fn zeroes_keep_their_space() -> Result<()> {
    use std::os::unix::fs::MetadataExt;
    if !have("qemu-io", &["qemu-io"]) {
        return Ok(());
    }
    for mode in MODES {
        let hearth = Hearth::serving("256M")?;
        let origin = hearth.origin("o.img", 32 * MIB)?;
        hearth.add("d", path(&origin), &["--mode", mode])?;
        let uri = hearth.uri("d");
        let taken = || -> Result<u64> { Ok(std::fs::metadata(&origin)?.blocks() * 512) };
        let before = taken()?;
        for (command, shrinks) in [("write -z 0 8M", false), ("write -z -u 8M 8M", true)] {
            run_ok("qemu-io", &["-f", "raw", "-c", command, &uri], hearth.dir())?;
            hearth.ok(&["disk", "flush", "d"])?;
            let freed = before.saturating_sub(taken()?);
            ensure!(
                (freed >= 8 * MIB) == shrinks,
                "{mode}: {command} freed {freed} bytes"
            );
        }
    }
    Ok(())
}

/// Writes past a cache that is full must not fill the log with records: eviction would have no
/// room left to make room.
#[test]
fn a_flood_of_writes_past_a_full_cache() -> Result<()> {
    if !have("fio", &["fio"]) {
        return Ok(());
    }
    for mode in ["write-through", "write-around", "off"] {
        let hearth = Hearth::serving("64M")?;
        let origin = hearth.origin("o.img", 128 * MIB)?;
        hearth.add("d", path(&origin), &["--seq-cutoff", "0"])?;
        let mut client = hearth.connect("d")?;
        client.sweep(Command::Cache, 0..96 * MIB, 1 << 18, 8, |_, _| {})?;
        drop(client);
        hearth.ok(&["disk", "set", "d", "--mode", mode])?;
        let uri = format!("--uri={}", hearth.uri("d"));
        let args = [
            "--name=flood",
            "--ioengine=nbd",
            &uri,
            "--rw=randwrite",
            "--bs=4k",
            "--iodepth=24",
            "--io_size=256M",
            "--size=128M",
            "--norandommap",
            "--output-format=json",
        ];
        run_ok("fio", &args, hearth.dir())?;
        let written = hearth.counter("d", "write_bytes")?;
        ensure!(written >= 256 * MIB, "{mode}: {written} bytes");
    }
    Ok(())
}

/// fio writes, reads and verifies with checksums in every block while another job trims.
#[test]
fn fio_verify() -> Result<()> {
    if !have("fio", &["fio"]) {
        return Ok(());
    }
    for mode in MODES {
        // Smaller flash than disk, so that eviction and destaging happen under the load.
        let hearth = Hearth::serving("128M")?;
        let origin = hearth.origin("o.img", 192 * MIB)?;
        hearth.add("d", path(&origin), &["--mode", mode])?;
        let uri = format!("--uri={}", hearth.uri("d"));
        let args = [
            "--ioengine=nbd",
            &uri,
            "--output-format=json",
            "--iodepth=16",
            "--verify_fatal=1",
            "--name=verify",
            "--rw=randrw",
            "--bsrange=512-64k",
            "--blockalign=512",
            "--size=128m",
            "--io_size=64m",
            "--verify=crc32c",
            "--verify_backlog=512",
            "--do_verify=1",
            "--name=trim",
            "--rw=randtrim",
            "--bs=16k",
            "--offset=128m",
            "--size=64m",
        ];
        let out = run("fio", &args, hearth.dir())?;
        let words = format!(
            "{}{}",
            String::from_utf8_lossy(&out.stdout),
            String::from_utf8_lossy(&out.stderr)
        );
        ensure!(out.status.success(), "{mode}: {words}\n{}", hearth.log());
    }
    Ok(())
}

/// Block status through libnbd: what was zeroed is reported so, and extents cover the range.
#[test]
fn block_status_covers_the_range() -> Result<()> {
    if !have_python_nbd("block status") {
        return Ok(());
    }
    let hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", 16 * MIB)?;
    hearth.add("d", path(&origin), &[])?;
    let code = format!(
        r#"
import nbd
h = nbd.NBD()
h.add_meta_context("base:allocation")
h.connect_uri("{}")
assert h.can_meta_context("base:allocation")
assert h.get_block_size(nbd.SIZE_MAXIMUM) == 32 << 20, h.get_block_size(nbd.SIZE_MAXIMUM)
h.pwrite(b"x" * 65536, 0)
h.zero(1 << 20, 4 << 20)
got = []
def extent(context, offset, entries, err):
    got.extend(entries)
offset = 0
while offset < h.get_size():
    del got[:]
    h.block_status(h.get_size() - offset, offset, extent)
    assert got, "no extent"
    for length, flags in zip(got[0::2], got[1::2]):
        assert length > 0 and flags in (0, 1, 2, 3), (length, flags)
        if offset <= 0 < offset + length:
            assert flags & 2 == 0, "data reported as zeroes"
        offset += length
assert offset == h.get_size(), offset
assert h.pread(1 << 20, 4 << 20) == bytes(1 << 20)
assert h.pread_structured(65536, 0, lambda buf, off, s, err: 0) == b"x" * 65536
try:
    h.pread(4096, h.get_size())
    raise SystemExit("read past the end was answered")
except nbd.Error as e:
    pass
h.cache(1 << 20, 0)
h.flush()
print("fine")
"#,
        hearth.uri("d")
    );
    let out = python_nbd(&code, hearth.dir())?;
    ensure!(out.contains("fine"), "{out}");
    Ok(())
}

/// Random requests of any alignment against a byte-for-byte model, with mode changes and
/// restarts in between.
#[test]
fn any_alignment_against_a_model() -> Result<()> {
    let size = 8 * MIB as usize + 1536;
    let mut hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", size as u64)?;
    let mut model = std::fs::read(&origin)?;
    hearth.add("d", path(&origin), &[])?;
    let mut rng = Rng::new(11);
    let mut client = hearth.connect("d")?;
    for step in 0..6000u32 {
        let longest = if rng.below(8) == 0 { 300_000 } else { 9000 };
        let len = 1 + rng.below(longest) as usize;
        let offset = rng.below((size - len) as u64) as usize;
        let range = offset..offset + len;
        match rng.below(10) {
            0..=3 => {
                let data = client.read(offset as u64, len as u32)?;
                ensure!(
                    data == model[range],
                    "step {step}: wrong bytes at {offset}+{len}"
                );
            }
            4..=7 => {
                rng.fill(&mut model[range.clone()]);
                client.write(offset as u64, &model[range])?;
            }
            8 => {
                client.call(
                    hearth_rig::nbd::Command::WriteZeroes,
                    offset as u64,
                    len as u32,
                    &[],
                )?;
                model[range].fill(0);
            }
            _ => client.flush()?,
        }
        if step % 1000 == 999 {
            let mode = MODES[rng.below(4) as usize];
            hearth.ok(&["disk", "set", "d", "--mode", mode])?;
        }
        if step % 2500 == 2499 {
            hearth.stop()?;
            hearth.start()?;
            client = hearth.connect("d")?;
        }
    }
    let data = client.read(0, size as u32)?;
    ensure!(
        data == model,
        "the disk differs from the model at byte {:?}",
        data.iter().zip(&model).position(|(a, b)| a != b)
    );
    hearth.ok(&["disk", "flush", "d"])?;
    ensure!(
        std::fs::read(&origin)? == model,
        "the flushed origin differs from the model"
    );
    Ok(())
}

/// A flush on one connection covers writes completed on another (multi-conn).
#[test]
fn flush_covers_all_connections() -> Result<()> {
    let mut hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", 16 * MIB)?;
    hearth.add("d", path(&origin), &[])?;
    let mut clients = (0..4)
        .map(|_| hearth.connect("d"))
        .collect::<Result<Vec<Client>>>()?;
    for (i, client) in clients.iter_mut().enumerate() {
        client.write(i as u64 * MIB, &vec![i as u8 + 1; 8192])?;
    }
    clients[3].flush()?;
    hearth.kill9()?;
    hearth.start()?;
    let mut client = hearth.connect("d")?;
    for i in 0..4u8 {
        ensure!(
            client.read(i as u64 * MIB, 8192)? == vec![i + 1; 8192],
            "connection {i}'s write was lost"
        );
    }
    Ok(())
}
