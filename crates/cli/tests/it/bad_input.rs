//! What people get wrong: one plain sentence each, and nothing changed.

use crate::common;
use std::os::unix::fs::FileExt;

use crate::common::{Bench, one_sentence, until};

const MIB: usize = 1 << 20;

/// What the program says is what the manual's table of errors quotes.
fn quoted(words: &str, quote: &str) {
    let manual = include_str!("../../../../docs/operations.md");
    let cell = manual
        .lines()
        .filter(|line| line.starts_with('|'))
        .any(|line| line.contains(&format!("`{quote}`")));
    assert!(cell && words.contains(quote), "{quote}: {words}");
}

/// A file's name is made by whoever may make a file: it must not move the cursor, hide a line or turn it round.
#[test]
fn file_names_steer_no_terminal() {
    let bench = Bench::serving();
    let name = "a\u{1b}[2J\u{9b}31m\u{202e}gmi.exe\u{2066}\u{7f}\r";
    let origin = bench.origin(name, MIB, 1);
    let steers = |text: &str| {
        let steers = |c: char| c.is_control() && c != '\n' || "\u{202e}\u{2066}".contains(c);
        text.chars().any(steers)
    };
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    let missing = bench.path(&format!("{name}.missing"));
    for args in [
        &["disk", "list"][..],
        &["disk", "show", "vm"],
        &["stats"],
        &["stats", "vm"],
        &["status"],
        &["events"],
        &["attach-help", "vm", "--for", "qemu"],
        &["advise"],
        &["disk", "add", "vm", "--origin", &origin],
        &["disk", "add", "other", "--origin", &missing],
        &["pool", "show", "--flash", &missing],
        &["simulate", &missing, "--sizes", "1M"],
        &["replay", &missing, "--to", &origin],
        &["config", "check", &missing],
    ] {
        for json in [&["--json"][..], &[]] {
            let out = bench.run(&[json, args].concat());
            for said in [&out.stdout, &out.stderr] {
                let said = String::from_utf8(said.clone()).unwrap();
                assert!(!steers(&said), "{args:?}: {said:?}");
            }
        }
    }
    assert_eq!(bench.json(&["disk", "show", "vm"])["origin"], origin);
}

#[test]
fn pools_that_are_none() {
    let bench = Bench::new();
    let flash = bench.path("flash");
    assert!(bench.start_refused().contains("flash"));
    std::fs::write(&flash, vec![1u8; 64 * MIB]).unwrap();
    let words = bench.start_refused();
    quoted(&words, "holds no Hearth pool");
    assert!(words.contains("pool create"), "{words}");
    for command in ["show", "import", "export"] {
        assert!(
            bench
                .refused(&["pool", command, "--flash", &flash])
                .contains("no Hearth pool")
        );
    }
    assert!(
        bench
            .refused(&["pool", "create", "--flash", &flash, "--flash", &flash])
            .contains("given twice")
    );
    assert!(
        bench
            .refused(&["pool", "create", "--flash", &bench.path("none")])
            .contains("--size")
    );
    let small = bench.refused(&[
        "pool",
        "create",
        "--flash",
        &bench.path("small"),
        "--size",
        "1M",
    ]);
    assert!(
        small.contains("1 MiB") && small.contains("at least 14 MiB") && small.contains("--size"),
        "{small}"
    );
}

#[test]
fn truncated_flash_changes_nothing() {
    let bench = Bench::with_pool();
    let flash = bench.path("flash");
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&flash)
        .unwrap();
    file.set_len(32 * MIB as u64).unwrap();
    let words = bench.start_refused();
    quoted(&words, "the device is truncated");
    assert!(words.contains("restore"), "{words}");
    file.set_len(64 * MIB as u64).unwrap();
    let mut bench = bench;
    bench.start();
}

#[test]
fn pools_of_a_newer_version() {
    let bench = Bench::with_pool();
    let file = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(bench.path("flash"))
        .unwrap();
    // Both copies: major version 99, and the checksum made right again (docs/format.md).
    for copy in [0u64, 1 << 20] {
        let mut block = vec![0u8; 4096];
        file.read_exact_at(&mut block, copy).unwrap();
        block[8..10].copy_from_slice(&99u16.to_le_bytes());
        block[12..16].fill(0);
        let crc = hearth_io::checksum::crc32c(&block);
        block[12..16].copy_from_slice(&crc.to_le_bytes());
        file.write_all_at(&block, copy).unwrap();
    }
    let words = bench.start_refused();
    quoted(&words, "this version of Hearth does not know");
    assert!(
        words.contains("99") && words.contains("newer Hearth"),
        "{words}"
    );
}

#[test]
fn devices_that_carry_something() {
    let bench = Bench::new();
    let path = bench.path("fs");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(64 * MIB as u64).unwrap();
    file.write_all_at(b"XFSB", 0).unwrap();
    let words = bench.refused(&["pool", "create", "--flash", &path]);
    quoted(&words, "carries");
    assert!(
        words.contains("an XFS file system") && words.contains("--force"),
        "{words}"
    );
    bench.ok(&["pool", "create", "--flash", &path, "--force"]);
    assert!(
        bench
            .refused(&["pool", "create", "--flash", &path])
            .contains("a Hearth pool")
    );
}

#[test]
fn disks_that_cannot_be() {
    let bench = Bench::serving();
    let flash = bench.path("flash");
    quoted(
        &bench.refused(&["pool", "create", "--flash", &flash, "--force"]),
        "is in use by",
    );
    let origin = bench.origin("o.img", 2 * MIB, 1);
    let empty = bench.path("empty");
    std::fs::write(&empty, b"").unwrap();
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    let add = |name: &str, origin: &str, more: &[&str]| {
        let mut args = vec!["disk", "add", name, "--origin", origin];
        args.extend(more);
        bench.refused(&args)
    };
    let other = bench.origin("other.img", MIB, 2);
    assert!(add("vm", &other, &[]).contains("already a disk named vm"));
    assert!(add("b", &origin, &[]).contains("already the origin of disk vm"));
    assert!(add("b", &bench.path("flash"), &[]).contains("own flash"));
    let nowhere = add("b", "/nowhere/at/all", &[]);
    assert!(nowhere.contains("/nowhere/at/all"));
    quoted(&nowhere, "cannot open the origin");
    assert!(add("b", &empty, &[]).contains("empty"));
    assert!(add("b", "/", &[]).contains("directory"));
    assert!(add("b", "model-latency=8:/x", &[]).contains("latency"));
    assert!(add("b/c", &other, &[]).contains("letters"));
    assert!(add("b", &other, &["--block-size", "5000"]).contains("4K"));
    assert!(add("b", &other, &["--min", "2M", "--max", "1M"]).contains("--min"));
    assert!(add("b", &other, &["--min", "10G"]).contains("can be kept in all"));
    assert!(add("b", &other, &["--max", "1K"]).contains("(1 KiB) is less than a block"));
    for limit in ["--min", "--max"] {
        let refused = bench.refused(&["disk", "set", "vm", limit, "4095"]);
        assert!(refused.contains(&format!("give {limit} 4K or more")));
    }
    for command in [
        &["disk", "show", "b"][..],
        &["disk", "flush", "b"],
        &["disk", "remove", "b"],
        &["stats", "b"],
    ] {
        assert!(bench.refused(command).contains("no disk named b"));
    }
    assert!(
        bench
            .refused(&["disk", "set", "vm", "--trust", "flash"])
            .contains("nothing to decide")
    );
    assert!(
        bench
            .refused(&["disk", "accept-loss", "vm"])
            .contains("lost nothing")
    );
    // Nothing of all that left anything behind.
    bench.ok(&["disk", "add", "b", "--origin", &other]);
    assert_eq!(bench.json(&["disk", "list"]).as_array().unwrap().len(), 2);
}

#[test]
fn origins_that_are_rather_something_else() {
    let bench = Bench::serving();
    let file = |name: &str, offset: u64, mark: &[u8]| {
        let path = bench.path(name);
        let file = std::fs::File::create(&path).unwrap();
        // As odd as image files are.
        file.set_len(MIB as u64 + 8).unwrap();
        file.write_all_at(mark, offset).unwrap();
        path
    };
    for (format, offset, mark) in [
        ("qcow2", 0, &b"QFI\xfb"[..]),
        ("vmdk", 0, b"KDMV"),
        ("vhdx", 0, b"vhdxfile"),
        ("vdi", 64, &0xbeda_107fu32.to_le_bytes()),
    ] {
        let path = file(format, offset, mark);
        let said = bench.refused(&["disk", "add", format, "--origin", &path]);
        assert!(
            said.contains(&format!("write {format}:{path}"))
                && said.contains(&format!("write file:{path}")),
            "{said}"
        );
        bench.ok(&["disk", "add", format, "--origin", &format!("file:{path}")]);
    }
    let plain = file("plain", 0, b"plain");
    let out = bench.run(&["disk", "add", "plain", "--origin", &plain]);
    let said = common::text(&out.stderr);
    assert!(out.status.success() && said.is_empty(), "{said}");
    let pool = bench.path("pool");
    bench.ok(&["pool", "create", "--flash", &pool, "--size", "16M"]);
    let words = bench.refused(&["disk", "add", "p", "--origin", &pool]);
    assert!(
        words.contains("a Hearth pool") && words.contains(&format!("file:{pool}")),
        "{words}"
    );
    // Nothing is started for an image that is not there.
    let missing = bench.path("nope.qcow2");
    let words = bench.refused(&["disk", "add", "q", "--origin", &format!("qcow2:{missing}")]);
    assert!(
        words.contains(&missing) && words.contains("check that it exists"),
        "{words}"
    );
    assert!(
        !bench.log().contains("qemu-storage-daemon"),
        "{}",
        bench.log()
    );
}

#[test]
fn origins_that_shrank() {
    let mut bench = Bench::serving();
    let origin = bench.origin("o.img", 2 * MIB, 3);
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    bench.stop();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&origin)
        .unwrap()
        .set_len(MIB as u64)
        .unwrap();
    bench.start();
    let disk = bench.disk("vm");
    assert_eq!(disk["state"], "refused");
    quoted(disk["reason"].as_str().unwrap(), "shrank from");
    assert!(bench.connect("vm").is_none());
    bench.ok(&["disk", "remove", "vm"]);
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
}

#[test]
fn an_origin_that_shrinks_while_attached_is_told_of() {
    let bench = Bench::serving();
    let origin = bench.origin("o.img", 2 * MIB, 3);
    let resize = |size: usize| {
        let file = std::fs::OpenOptions::new().write(true).open(&origin);
        file.unwrap().set_len(size as u64).unwrap();
    };
    let notices = || bench.disk("vm")["notices"].to_string();
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    resize(MIB);
    until("the disk says so", || {
        notices()
            .contains("shrank from 2097152 to 1048576")
            .then_some(())
    });
    resize(2 * MIB);
    until("it says so no more", || {
        (!notices().contains("shrank")).then_some(())
    });
    let log = bench.log();
    assert_eq!(log.matches("the origin shrank").count(), 1, "{log}");
    assert!(log.contains("has its size back"), "{log}");
}

#[test]
fn an_origin_that_has_its_size_back_is_attached() {
    let mut bench = Bench::serving();
    let origin = bench.origin("o.img", 2 * MIB, 3);
    let resize = |size: usize| {
        let file = std::fs::OpenOptions::new().write(true).open(&origin);
        file.unwrap().set_len(size as u64).unwrap();
    };
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    bench.stop();
    resize(MIB);
    bench.start();
    assert_eq!(bench.disk("vm")["state"], "refused");
    resize(2 * MIB);
    until("the disk is attached", || {
        (bench.disk("vm")["state"] == "attached").then_some(())
    });
    assert_eq!(bench.connect("vm").unwrap().size as usize, 2 * MIB);
}

#[test]
fn more_ram_than_there_is() {
    let bench = Bench::with_pool();
    let flash = bench.path("flash");
    for size in ["1024T", "8000000T"] {
        let words = bench.refused(&[
            "serve",
            "--flash",
            &flash,
            "--log",
            "off",
            "--ram-stage",
            size,
        ]);
        assert!(words.contains("--ram-stage") && words.contains("lower it"));
    }
}

#[test]
fn no_daemon_and_no_permission() {
    let bench = Bench::new();
    let words = bench.refused(&["disk", "list"]);
    assert!(
        words.contains("no hearth daemon") && words.contains("hearth serve"),
        "{words}"
    );
    let out = bench.run(&["disk", "list", "--json"]);
    let error: serde_json::Value = serde_json::from_slice(&out.stderr).unwrap();
    assert!(
        error["error"]
            .as_str()
            .unwrap()
            .contains("no hearth daemon")
            && !error["remedy"].as_str().unwrap().is_empty()
    );
    assert_eq!(bench.run(&["disk", "add"]).status.code(), Some(2));
}

#[test]
fn usage_errors_do_not_ask_for_what_the_environment_gives() {
    let bench = Bench::new();
    let hearth = |args: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_hearth"));
        command
            .env("HEARTH_RUN_DIR", bench.run_dir())
            .env("HEARTH_LOG", "off")
            .args(args);
        common::text(&command.output().unwrap().stderr)
    };
    // What is asked for by usage, and what hearth.toml could have given instead, which is said in words.
    for (args, asked) in [
        (&["disk", "add", "vm"][..], "Usage:"),
        (&["serve"], "--flash"),
    ] {
        let words = hearth(args);
        assert!(words.contains(asked), "{words}");
        assert!(
            !words.contains("--run-dir") && !words.contains("--log"),
            "{words}"
        );
    }
    let run_dir = bench.run_dir().display().to_string();
    assert!(hearth(&["disk", "list"]).contains(&run_dir));
}

#[test]
fn sockets_and_addresses() {
    let bench = Bench::with_pool();
    let flash = bench.path("flash");
    let remote = bench.run(&[
        "serve",
        "--flash",
        &flash,
        "--nbd-listen",
        "0.0.0.0:0",
        "--log",
        "off",
    ]);
    assert!(one_sentence(&remote, 1).contains("--allow-remote"));
    let tls = bench.run(&[
        "serve", "--flash", &flash, "--tls", "required", "--log", "off",
    ]);
    assert!(one_sentence(&tls, 1).contains("--nbd-listen"));
    let memory = bench.run(&["serve", "--flash", &flash, "--memory", "1K", "--log", "off"]);
    assert!(one_sentence(&memory, 1).contains("--memory"));
    let long = format!("{}/{}", bench.path("r"), "x".repeat(120));
    let out = bench.run(&[
        "serve",
        "--flash",
        &flash,
        "--run-dir",
        &long,
        "--log",
        "off",
    ]);
    assert!(one_sentence(&out, 1).contains("longer than"));
}

#[test]
fn the_api_refuses_nonsense() {
    use std::io::{Read, Write};
    let bench = Bench::serving();
    let ask = |request: String| {
        let mut stream =
            std::os::unix::net::UnixStream::connect(bench.run_dir().join("api.sock")).unwrap();
        let _ = stream.write_all(request.as_bytes());
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    };
    let post = |path: &str, body: &str| {
        ask(format!(
            "POST {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        ))
    };
    let typo = post("/v1/disks", r#"{"name":"a","origin":"/o","blocksize":1}"#);
    assert!(
        typo.starts_with("HTTP/1.1 400") && typo.contains("blocksize") && typo.contains("remedy"),
        "{typo}"
    );
    assert!(post("/v1/disks", "{").starts_with("HTTP/1.1 400"));
    let long_name = |bytes: usize| {
        let body = format!("{{\"name\":\"{}\"}}", "x".repeat(bytes));
        post("/v1/disks", &body)
    };
    assert!(long_name(10_000).starts_with("HTTP/1.1 400"));
    let large = long_name(100_000);
    assert!(
        large.starts_with("HTTP/1.1 413") && large.contains("remedy"),
        "{large}"
    );
    let relative = post("/v1/disks", r#"{"name":"a","origin":"o"}"#);
    assert!(relative.contains("relative"), "{relative}");
    let nowhere = ask("GET /v2 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".to_owned());
    assert!(
        nowhere.starts_with("HTTP/1.1 404") && nowhere.contains("openapi"),
        "{nowhere}"
    );
    let method = ask("DELETE /v1/pool HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".to_owned());
    assert!(method.starts_with("HTTP/1.1 405"), "{method}");
    let document =
        ask("GET /v1/openapi.json HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".to_owned());
    assert!(document.contains("/v1/disks/{name}/flush"), "{document}");
    assert!(!bench.log().contains("panicked"));
}

/// The answer to somebody who is gone is a broken pipe, which ends most programs.
#[test]
fn whoever_hangs_up_hurts_nobody() {
    use std::io::Write;
    let bench = Bench::serving();
    for _ in 0..300 {
        let mut stream =
            std::os::unix::net::UnixStream::connect(bench.run_dir().join("api.sock")).unwrap();
        // Gone after the request is answered at once, or before: all the same to a daemon.
        let _ = stream.write_all(b"GET /nowhere HTTP/1.1\r\nHost: h\r\n\r\n");
    }
    bench.ok(&["pool", "show"]);
}

/// A log that nobody reads any more is one thing the daemon cannot complain about, and no reason to end.
#[test]
fn whoever_stops_reading_the_log_hurts_nobody() {
    let bench = Bench::with_pool();
    let flash = bench.path("flash");
    let mut daemon = bench
        .command(&["serve", "--flash", &flash])
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(daemon.stderr.take());
    until("it serves", || {
        bench.run(&["pool", "show"]).status.success().then_some(())
    });
    let origin = bench.path("origin");
    std::fs::write(&origin, [0; 1 << 20]).unwrap();
    // Both say so in the log.
    bench.ok(&["disk", "add", "d", "--origin", &origin]);
    bench.ok(&["disk", "remove", "d"]);
    bench.ok(&["disk", "list"]);
    // SAFETY: a signal to a child that has not been waited for.
    assert_eq!(unsafe { libc::kill(daemon.id() as i32, libc::SIGTERM) }, 0);
    assert!(daemon.wait().unwrap().success());
}
