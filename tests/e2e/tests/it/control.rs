//! Controlling a daemon when something is wrong: clients that hold the control socket, data
//! connections that hold every descriptor, disks that cannot be written back, data that is lost,
//! and people who may use disks but not control them.

use anyhow::{Context, Result, ensure};
use hearth_rig::clients::have;
use hearth_rig::daemon::{binary, path};
use hearth_rig::{Hearth, wait};
use serde_json::Value;
use std::fs::{File, OpenOptions, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
const LIMIT: Duration = Duration::from_secs(60);
/// Shorter than the time any client is given to say what it wants.
const SOON: Duration = Duration::from_secs(9);

/// Sets a limit of the daemon's (setrlimit(2)).
fn limit(hearth: &Hearth, which: libc::__rlimit_resource_t, value: u64) -> Result<()> {
    let pid = hearth.pid().context("not running")? as libc::pid_t;
    let limit = libc::rlimit {
        rlim_cur: value,
        // Of descriptors nobody may have so many.
        rlim_max: match which {
            libc::RLIMIT_NOFILE => value,
            _ => libc::RLIM_INFINITY,
        },
    };
    // SAFETY: a pointer to a limit that lives across the call, and none to be filled in.
    let rc = unsafe { libc::prlimit(pid, which, &limit, std::ptr::null_mut()) };
    ensure!(rc == 0, "prlimit: {}", std::io::Error::last_os_error());
    Ok(())
}

/// A disk as `hearth disk show --json` tells it.
fn shown(hearth: &Hearth, name: &str) -> Result<Value> {
    let text = hearth.ok(&["disk", "show", name, "--json"])?;
    serde_json::from_str(&text).with_context(|| format!("no JSON: {text}"))
}

/// What a command said that must end by itself.
fn end(mut child: Child, what: &str) -> Result<Output> {
    if let Err(e) = wait::until(what, LIMIT, || child.try_wait().ok().flatten()) {
        child.kill()?;
        child.wait()?;
        return Err(e);
    }
    Ok(child.wait_with_output()?)
}

/// The daemon answers a question, and not only once its clients' time is up.
fn answers_soon(hearth: &Hearth) -> Result<()> {
    let asked = Instant::now();
    let said = end(hearth.begin(&["disk", "list"])?, "hearth disk list")?;
    ensure!(
        said.status.success(),
        "{}",
        String::from_utf8_lossy(&said.stderr)
    );
    ensure!(asked.elapsed() < SOON, "after {:?}", asked.elapsed());
    Ok(())
}

#[test]
fn half_open_requests_do_not_shut_out_the_operator() -> Result<()> {
    const CLIENTS: usize = 1500;
    let hearth = Hearth::serving("256M")?;
    let own = libc::rlimit {
        rlim_cur: 2 * CLIENTS as u64,
        rlim_max: 2 * CLIENTS as u64,
    };
    // SAFETY: a pointer to a limit that lives across the call, and none to be filled in.
    let rc = unsafe { libc::prlimit(0, libc::RLIMIT_NOFILE, &own, std::ptr::null_mut()) };
    ensure!(rc == 0, "prlimit: {}", std::io::Error::last_os_error());
    // As most systems have it.
    limit(&hearth, libc::RLIMIT_NOFILE, 1024)?;
    let socket = hearth.run_dir().join("api.sock");
    let mut open = Vec::new();
    for i in 0..CLIENTS {
        let mut client = UnixStream::connect(&socket).with_context(|| format!("client {i}"))?;
        // It may have been made to leave already.
        let _ = client.write_all(b"POST /v1/disks HTTP/1.1\r\nContent-Length: 99\r\n");
        open.push(client);
    }
    answers_soon(&hearth)?;
    drop(open);
    Ok(())
}

#[test]
fn data_connections_leave_descriptors_for_control() -> Result<()> {
    let hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", MIB)?;
    hearth.add("d", path(&origin), &[])?;
    let fds = format!("/proc/{}/fd", hearth.pid().context("not running")?);
    let used = || Ok::<_, anyhow::Error>(std::fs::read_dir(&fds)?.count() as u64);
    limit(&hearth, libc::RLIMIT_NOFILE, used()? + 20)?;
    let mut clients = Vec::new();
    for _ in 0..60 {
        let client = UnixStream::connect(hearth.socket())?;
        client.set_read_timeout(Some(Duration::from_millis(50)))?;
        let mut greeting = [0; 8];
        // Those who find no descriptor left wait for one.
        let _ = (&client).read(&mut greeting);
        clients.push(client);
    }
    for _ in 0..3 {
        answers_soon(&hearth)?;
    }
    Ok(())
}

#[test]
fn a_disk_that_cannot_be_written_back_says_so_everywhere() -> Result<()> {
    // A daemon told of a write beyond the limit by a signal would end; ignored ones stay so in
    // programs that are started.
    // SAFETY: no handler is installed.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    let hearth = Hearth::serving("256M")?;
    let origin = hearth.dir().join("o.img");
    File::create(&origin)?.set_len(300 * MIB)?;
    hearth.add("d", path(&origin), &[])?;
    limit(&hearth, libc::RLIMIT_FSIZE, 270 * MIB)?;
    let mut client = hearth.connect("d")?;
    client.write(280 * MIB, &[0xAB; 65536])?;
    client.flush()?;

    wait::until("the log says so", LIMIT, || {
        hearth.log().contains("cannot write back to").then_some(())
    })?;
    let log = hearth.log();
    let line = log
        .lines()
        .find(|l| l.contains("cannot write back to"))
        .unwrap_or_default();
    for part in ["ERROR", "disk=d", "o.img", "errno 27", "64 KiB"] {
        ensure!(line.contains(part), "no {part}: {line}");
    }
    let events = hearth.ok(&["events", "--disk", "d", "--json"])?;
    for part in ["write-back-failing", "\"dirty_bytes\":65536"] {
        ensure!(events.contains(part), "no {part}: {events}");
    }
    let list = hearth.ok(&["disk", "list"])?;
    ensure!(
        list.contains("attached (cannot write back: File too large (errno 27))"),
        "{list}"
    );
    let show = hearth.ok(&["disk", "show", "d"])?;
    ensure!(show.contains("cannot write back to"), "{show}");
    let trouble = shown(&hearth, "d")?["cannot_write_back"].take();
    ensure!(
        trouble["errno"] == 27 && trouble["dirty"] == 65536,
        "{trouble}"
    );
    ensure!(hearth.counter("d", "destage_errors")? >= 1);
    for stats in [hearth.ok(&["stats"])?, hearth.ok(&["stats", "d"])?] {
        ensure!(stats.contains("d CANNOT BE WRITTEN BACK"), "{stats}");
    }
    ensure!(hearth.stats("d")?["cannot_write_back"]["errno"] == 27);

    // It ends as soon as the origin takes writes, and that is said, too.
    limit(&hearth, libc::RLIMIT_FSIZE, libc::RLIM_INFINITY)?;
    hearth.ok(&["disk", "flush", "d"])?;
    wait::until("the log says that it is over", LIMIT, || {
        hearth
            .log()
            .contains("takes what is written back again")
            .then_some(())
    })?;
    ensure!(shown(&hearth, "d")?["cannot_write_back"].is_null());
    ensure!(!hearth.ok(&["disk", "list"])?.contains("cannot write back"));
    let mut back = vec![0; 65536];
    File::open(&origin)?.read_exact_at(&mut back, 280 * MIB)?;
    ensure!(back == [0xAB; 65536], "the origin has something else");
    Ok(())
}

/// Makes the only copy of the blocks full of `byte` on flash unreadable.
fn rot(hearth: &Hearth, byte: u8) -> Result<()> {
    let flash = OpenOptions::new()
        .read(true)
        .write(true)
        .open(hearth.flash())?;
    let mut block = [0; 4096];
    let mut found = 0;
    for at in (0..flash.metadata()?.size()).step_by(4096) {
        flash.read_exact_at(&mut block, at)?;
        if block == [byte; 4096] {
            flash.write_all_at(&[!byte; 4096], at)?;
            found += 1;
        }
    }
    flash.sync_all()?;
    ensure!(found > 0, "nothing on flash is full of {byte:#x}");
    Ok(())
}

#[test]
fn a_flush_that_can_only_wait_for_what_is_lost_ends_and_says_what_is_true() -> Result<()> {
    let hearth = Hearth::serving("256M")?;
    let origin = hearth.origin("o.img", 16 * MIB)?;
    let fd = File::open(&origin)?;
    let origin = format!("fault=eio-write:{}", path(&origin));
    hearth.add("d", &origin, &[])?;
    let mut client = hearth.connect("d")?;
    client.write(MIB, &[0xAB; 8192])?;
    client.flush()?;
    rot(&hearth, 0xAB)?;
    ensure!(client.read(MIB, 8192).is_err(), "what is gone was read");

    // All that is left is lost: nothing to wait for.
    let said = end(
        hearth.begin(&["disk", "flush", "d"])?,
        "the flush of lost blocks",
    )?;
    let words = String::from_utf8_lossy(&said.stderr).into_owned();
    ensure!(!said.status.success(), "{words}");
    for part in [
        "8192 bytes are lost",
        "offset 1048576",
        "hearth disk accept-loss d",
    ] {
        ensure!(words.contains(part), "no “{part}” in: {words}");
    }
    let error = hearth.refused(&["pool", "export", "--yes"])?;
    ensure!(error.contains("accept-loss d"), "{error}");

    // With something else to wait for, calling it off says what is so, and no more.
    client.write(2 * MIB, &[0xCD; 4096])?;
    client.flush()?;
    let flush = hearth.begin(&["disk", "flush", "d"])?;
    wait::until("the flush goes on", LIMIT, || {
        (shown(&hearth, "d").ok()?["state"] == "flushing").then_some(())
    })?;
    // SAFETY: a signal to a child that has not been waited for.
    unsafe { libc::kill(flush.id() as i32, libc::SIGINT) };
    let said = end(flush, "the flush that was called off")?;
    let words = String::from_utf8_lossy(&said.stderr).into_owned();
    ensure!(
        words.contains("4 KiB of d are still only on flash"),
        "{words}"
    );
    ensure!(
        words.contains("8192 bytes are lost") && words.contains("accept-loss d"),
        "{words}"
    );
    ensure!(!words.contains("nothing is lost"), "{words}");

    let given_up = hearth.ok(&["disk", "accept-loss", "d"])?;
    ensure!(given_up.contains("given up"), "{given_up}");
    let mut plain = vec![0; 8192];
    fd.read_exact_at(&mut plain, MIB)?;
    ensure!(client.read(MIB, 8192)? == plain, "not what the origin has");
    Ok(())
}

/// A program run as somebody else, in one group alone.
fn as_stranger(group: &str, program: &str, args: &[&str]) -> Result<Output> {
    Command::new("setpriv")
        .args([
            "--reuid",
            "65534",
            "--regid",
            group,
            "--clear-groups",
            program,
        ])
        .args(args)
        .stdin(Stdio::null())
        .output()
        .context("cannot run setpriv")
}

#[test]
fn whoever_may_use_disks_may_not_control_the_daemon() -> Result<()> {
    const TEST: &str = "whoever_may_use_disks_may_not_control_the_daemon";
    const GUESTS: &str = "64711";
    const CONTROL: &str = "64712";
    // SAFETY: geteuid has no preconditions and cannot fail.
    if unsafe { libc::geteuid() } != 0 || !have(TEST, &["setpriv", "nbdinfo", "python3"]) {
        println!("SKIPPED {TEST}: needs root, setpriv and nbdinfo");
        return Ok(());
    }
    let mut hearth = Hearth::with_pool("256M")?;
    for dir in [
        hearth.dir().to_owned(),
        hearth.run_dir().parent().context("no parent")?.to_owned(),
    ] {
        std::fs::set_permissions(dir, Permissions::from_mode(0o711))?;
    }
    let bin = binary()?;
    if !as_stranger(GUESTS, path(&bin), &["--version"])?
        .status
        .success()
        || !as_stranger(GUESTS, "test", &["-x", path(hearth.dir())])?
            .status
            .success()
    {
        println!(
            "SKIPPED {TEST}: others may not enter {}",
            hearth.dir().display()
        );
        return Ok(());
    }
    let groups = ["--socket-group", GUESTS, "--control-group", CONTROL];
    hearth.serve_args = groups.map(str::to_owned).to_vec();
    hearth.start()?;
    let origin = hearth.origin("o.img", MIB)?;
    hearth.add("d", path(&origin), &[])?;

    let run_dir = hearth.run_dir();
    let control = |group: &str| {
        as_stranger(
            group,
            path(&bin),
            &["--run-dir", path(&run_dir), "disk", "list"],
        )
    };
    let info = as_stranger(GUESTS, "nbdinfo", &["--size", &hearth.uri("d")])?;
    let words = String::from_utf8_lossy(&info.stderr).into_owned();
    ensure!(
        info.status.success() && info.stdout.starts_with(b"1048576"),
        "{words}"
    );
    let refused = control(GUESTS)?;
    let words = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(!refused.status.success(), "a guest may control the daemon");
    ensure!(
        words.contains("you may not use the control socket"),
        "{words}"
    );
    // vhost-user: the same rights as NBD.
    let connect = format!(
        "import socket; socket.socket(socket.AF_UNIX).connect('{}')",
        path(&hearth.vhost_socket("d"))
    );
    ensure!(
        as_stranger(GUESTS, "/usr/bin/python3", &["-c", &connect])?
            .status
            .success()
    );

    let allowed = control(CONTROL)?;
    ensure!(
        allowed.status.success(),
        "{}",
        String::from_utf8_lossy(&allowed.stderr)
    );
    ensure!(
        !as_stranger(CONTROL, "nbdinfo", &[&hearth.uri("d")])?
            .status
            .success()
    );
    ensure!(
        !as_stranger(CONTROL, "/usr/bin/python3", &["-c", &connect])?
            .status
            .success()
    );
    // Nobody else gets anything.
    ensure!(!control("65534")?.status.success());
    Ok(())
}

/// A daemon for a control group and a second service in another, and a directory that the administrator listed; nothing
/// where that cannot be.
fn shared(test: &str) -> Result<Option<(Hearth, PathBuf)>> {
    // SAFETY: geteuid has no preconditions and cannot fail.
    if unsafe { libc::geteuid() } != 0 || !have(test, &["setpriv", "python3"]) {
        println!("SKIPPED {test}: needs root, setpriv and python3");
        return Ok(None);
    }
    let mut hearth = Hearth::with_pool("256M")?;
    for dir in [
        hearth.dir().to_owned(),
        hearth.run_dir().parent().context("no parent")?.to_owned(),
    ] {
        std::fs::set_permissions(dir, Permissions::from_mode(0o711))?;
    }
    let bin = binary()?;
    let runs = as_stranger(CONTROL, path(&bin), &["--version"])?;
    let enters = as_stranger(CONTROL, "test", &["-x", path(hearth.dir())])?;
    if !runs.status.success() || !enters.status.success() {
        println!(
            "SKIPPED {test}: others may not enter {}",
            hearth.dir().display()
        );
        return Ok(None);
    }
    let listed = hearth.dir().join("listed");
    std::fs::create_dir(&listed)?;
    let groups = [
        "--control-group",
        CONTROL,
        "--monitor-group",
        SECOND,
        "--allow-path",
    ];
    hearth.serve_args = groups.map(str::to_owned).to_vec();
    hearth.serve_args.push(path(&listed).to_owned());
    hearth.start()?;
    Ok(Some((hearth, listed)))
}

const CONTROL: &str = "64712";
const SECOND: &str = "64713";

/// One request over a socket by somebody of a group: the status, and what is said.
fn request(group: &str, socket: &Path, call: &str, body: &str) -> Result<(u32, String)> {
    const ASK: &str = "
import http.client, socket, sys
path, method, target, body = sys.argv[1:]
http = http.client.HTTPConnection('hearth')
http.sock = socket.socket(socket.AF_UNIX)
http.sock.connect(path)
http.request(method, target, body or None, {'Content-Type': 'application/json'} if body else {})
answer = http.getresponse()
print(answer.status, answer.read().decode())
";
    let (method, target) = call.split_once(' ').context("a method and a path")?;
    let said = as_stranger(
        group,
        "/usr/bin/python3",
        &["-c", ASK, path(socket), method, target, body],
    )?;
    let words = String::from_utf8_lossy(&said.stdout).into_owned();
    let (status, words) = words
        .split_once(' ')
        .with_context(|| String::from_utf8_lossy(&said.stderr).into_owned())?;
    Ok((status.parse()?, words.to_owned()))
}

/// The control group adds disks where the administrator lets it, and becomes root by nothing that it may ask.
#[test]
fn control_group_gains_no_rights_of_root() -> Result<()> {
    let Some((hearth, listed)) = shared("control_group_gains_no_rights_of_root")? else {
        return Ok(());
    };
    let (mark, program) = (hearth.dir().join("mark"), hearth.dir().join("program"));
    std::fs::write(&program, format!("#!/bin/sh\nid -u >{}\n", path(&mark)))?;
    std::fs::set_permissions(&program, Permissions::from_mode(0o755))?;
    let outside = hearth.origin("o.img", MIB)?;
    std::fs::write(listed.join("a.img"), vec![1; MIB as usize])?;
    std::os::unix::fs::symlink(&outside, listed.join("link.img"))?;
    let within = |name: &str| path(&listed.join(name)).to_owned();
    let disk = |origin: &str| format!(r#"{{"name":"d","origin":"{origin}"}}"#);
    let upgrade = format!(r#"{{"program":"{}"}}"#, path(&program));
    let store = format!(r#"{{"name":"s","directory":"{}"}}"#, path(&listed));
    let set_aside = format!(r#"{{"path":"{}","bytes":1048576}}"#, within("area"));
    let file = |name: &str| format!(r#"{{"file":"{name}"}}"#);
    let leg = format!(r#"{{"add":"{}"}}"#, path(&outside));
    let target = r#"{"origin":"/etc/hearth-new.img"}"#.to_owned();
    let (control, second) = (
        hearth.run_dir().join("api.sock"),
        hearth.run_dir().join("monitor.sock"),
    );
    let doors = [(CONTROL, &control), (SECOND, &second)];
    for (group, socket) in doors {
        let ask = |call: &str, body: &str| request(group, socket, call, body);
        ensure!(ask("GET /v1/pool", "")?.0 == 200);
        for (call, body) in [
            ("POST /v1/upgrade/check", upgrade.clone()),
            ("POST /v1/upgrade", upgrade.clone()),
            ("POST /v1/pool/export", r#"{"yes":true}"#.to_owned()),
            ("POST /v1/datastores", store.clone()),
            ("POST /v1/pool/areas", set_aside.clone()),
            ("POST /v1/disks", disk(path(&outside))),
            ("POST /v1/disks", disk("/etc/passwd")),
            ("POST /v1/disks", disk(&within("link.img"))),
            (
                "POST /v1/disks",
                disk(&format!("nbd+unix:///d?socket={}", path(&control))),
            ),
            (
                "POST /v1/origins/look",
                r#"{"origin":"/etc/shadow"}"#.to_owned(),
            ),
        ] {
            let (status, words) = ask(call, &body)?;
            ensure!(status == 403, "{group}: {call} {body}: {status} {words}");
        }
        let (status, words) = ask("POST /v1/disks", &disk(&within("a.img")))?;
        ensure!(status == 200, "{group}: {words}");
        for (call, body) in [
            ("POST /v1/disks/d/recording", file("/etc/cron.d/hearth")),
            ("POST /v1/disks/d/recording", file(&within("../t.trace"))),
            ("POST /v1/disks/d/mirror", leg.clone()),
            ("POST /v1/disks/d/move", target.clone()),
            ("PATCH /v1/disks/d", r#"{"allow_backing":true}"#.to_owned()),
        ] {
            let (status, words) = ask(call, &body)?;
            ensure!(status == 403, "{group}: {call} {body}: {status} {words}");
        }
        let trace = format!("{group}.trace");
        let (status, words) = ask("POST /v1/disks/d/recording", &file(&within(&trace)))?;
        ensure!(status == 200, "{group}: {words}");
        ensure!(ask("POST /v1/disks/d/recording/stop", "")?.0 == 200);
        hearth.ok(&["disk", "remove", "d"])?;
    }
    ensure!(!mark.exists(), "a program was run");
    // Neither group has the other's socket, and the command line says what to do.
    ensure!(request(SECOND, &control, "GET /v1/pool", "").is_err());
    ensure!(request(CONTROL, &second, "GET /v1/pool", "").is_err());
    let run_dir = hearth.run_dir();
    let add = [
        "--run-dir",
        path(&run_dir),
        "disk",
        "add",
        "x",
        "--origin",
        path(&outside),
    ];
    let said = as_stranger(CONTROL, path(&binary()?), &add)?;
    let words = String::from_utf8_lossy(&said.stderr).into_owned();
    ensure!(
        !said.status.success() && words.contains("allow-path"),
        "{words}"
    );
    // Root names what it likes.
    hearth.add("x", path(&outside), &[])?;
    Ok(())
}

/// The second service is in no group of the daemon's, and yet its own socket is for the control group.
#[test]
fn second_service_needs_no_control_group() -> Result<()> {
    let Some((hearth, _)) = shared("second_service_needs_no_control_group")? else {
        return Ok(());
    };
    let group: u32 = CONTROL.parse()?;
    let own = PathBuf::from(format!("{}-monitor", path(&hearth.run_dir())));
    let state = hearth.dir().join("second");
    for (dir, group) in [(&own, Some(group)), (&state, None)] {
        std::fs::create_dir(dir)?;
        std::os::unix::fs::chown(dir, Some(65534), group)?;
    }
    // As tmpfiles.d makes it.
    std::fs::set_permissions(&own, Permissions::from_mode(0o2711))?;
    std::fs::set_permissions(&state, Permissions::from_mode(0o700))?;
    let bin = binary()?;
    let run_dir = hearth.run_dir();
    let mut service = Command::new("setpriv")
        .args([
            "--reuid",
            "65534",
            "--regid",
            SECOND,
            "--clear-groups",
            path(&bin),
        ])
        .args([
            "monitor",
            "--run-dir",
            path(&run_dir),
            "--control-group",
            CONTROL,
        ])
        .args(["--state-dir", path(&state)])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let socket = own.join("api.sock");
    let up = wait::until(
        "the second service sees the daemon",
        Duration::from_secs(60),
        || {
            let (_, words) = request(CONTROL, &socket, "GET /v1/monitor", "").ok()?;
            let said: Value = serde_json::from_str(&words).ok()?;
            (said["daemon"]["link"] == "up").then_some(())
        },
    );
    let meta = std::fs::metadata(&socket).map(|m| (m.mode() & 0o777, m.gid()));
    service.kill()?;
    service.wait()?;
    up?;
    ensure!(meta? == (0o660, group));
    Ok(())
}

/// Somebody who is not root asks, and root's daemon is the one there is.
#[test]
fn whoever_is_not_root_is_told_of_roots_daemon() -> Result<()> {
    const TEST: &str = "whoever_is_not_root_is_told_of_roots_daemon";
    // SAFETY: geteuid has no preconditions and cannot fail.
    if unsafe { libc::geteuid() } != 0 || !have(TEST, &["setpriv", "unshare"]) {
        println!("SKIPPED {TEST}: needs root, setpriv and unshare");
        return Ok(());
    }
    let hearth = Hearth::serving("256M")?;
    std::fs::set_permissions(hearth.run_dir(), Permissions::from_mode(0o711))?;
    let bin = binary()?;
    if !as_stranger("64711", path(&bin), &["--version"])?
        .status
        .success()
    {
        println!("SKIPPED {TEST}: others may not run {}", bin.display());
        return Ok(());
    }
    // The daemon's directory where root's is by default, for this command alone.
    let script = format!(
        "mount -t tmpfs t /run && mkdir /run/hearth && mount --bind {} /run/hearth && \
         exec setpriv --reuid 65534 --regid 65534 --clear-groups {} stats",
        path(&hearth.run_dir()),
        path(&bin)
    );
    let said = Command::new("unshare")
        .args(["-m", "--propagation", "private", "sh", "-c", &script])
        .env_remove("XDG_RUNTIME_DIR")
        .env_remove("HEARTH_RUN_DIR")
        .output()?;
    let words = String::from_utf8_lossy(&said.stderr).into_owned();
    ensure!(!said.status.success(), "{words}");
    ensure!(
        words.contains("root's daemon has its socket at /run/hearth/api.sock")
            && words.contains("sudo"),
        "{words}"
    );
    Ok(())
}

#[test]
fn wrong_usage_is_json_where_json_was_asked_for() -> Result<()> {
    let hearth = Hearth::bare()?;
    for args in [
        &["--json", "disk", "rename", "a", "b"][..],
        &["disk", "add", "vm", "--json"],
        &["state", "--json"],
    ] {
        let said = hearth.hearth(args)?;
        let words = String::from_utf8_lossy(&said.stderr).into_owned();
        ensure!(said.status.code() == Some(2), "{args:?}: {}", said.status);
        let body: Value = serde_json::from_str(&words).with_context(|| words.clone())?;
        ensure!(
            body["error"].is_string() && body["remedy"].is_string(),
            "{words}"
        );
        ensure!(!words.contains("remove"), "{words}");
    }
    Ok(())
}

/// The unit in the manual does what the manual says: it is valid, and an export is not a reason to
/// start the daemon again.
#[test]
fn the_documented_unit_starts_again_after_crashes_only() -> Result<()> {
    const TEST: &str = "the_documented_unit_starts_again_after_crashes_only";
    let manual = include_str!("../../../../docs/operations.md");
    let unit = manual
        .split("```ini\n")
        .nth(1)
        .and_then(|rest| rest.split("```").next())
        .context("no unit in the manual")?;
    for line in ["Restart=on-failure", "StartLimitIntervalSec=0"] {
        ensure!(unit.lines().any(|l| l == line), "no {line} in:\n{unit}");
    }
    let mut hearth = Hearth::serving("256M")?;
    let pid = hearth.pid().context("not running")?;
    hearth.ok(&["pool", "export"])?;
    // Ended, and not yet waited for.
    wait::until("the daemon ends", LIMIT, || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.contains(") Z ").then_some(())
    })?;
    let status = hearth.stop();
    ensure!(
        status.as_ref().is_ok_and(|s| s.success()),
        "the export ended {pid} with {status:?}"
    );
    if !have(TEST, &["systemd-analyze"]) {
        return Ok(());
    }
    let file = hearth.dir().join("hearth.service");
    let verify = |unit: &str| -> Result<String> {
        std::fs::write(&file, unit)?;
        let said = Command::new("systemd-analyze")
            .arg("verify")
            .arg(&file)
            .output()?;
        let text = format!(
            "{}{}",
            String::from_utf8_lossy(&said.stdout),
            String::from_utf8_lossy(&said.stderr)
        );
        // Others' units are others' business.
        Ok(text.lines().filter(|l| l.contains("hearth")).collect())
    };
    let unit = unit.replace("/usr/local/bin/hearth", path(&binary()?));
    let complaints = verify(&unit)?;
    ensure!(complaints.is_empty(), "{complaints}");
    ensure!(!verify(&unit.replace("Restart=", "Restrt="))?.is_empty());
    Ok(())
}

/// A terminal of one's own, 80 by 24, and what was written to it.
struct Terminal {
    /// Our end.
    ours: std::fs::File,
    /// The program's end.
    theirs: std::fs::File,
    written: std::sync::Arc<std::sync::Mutex<Vec<u8>>>,
}

impl Terminal {
    fn open() -> Result<Terminal> {
        use std::io::Read;
        use std::os::fd::FromRawFd;
        let size = libc::winsize {
            ws_row: 24,
            ws_col: 80,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let (mut ours, mut theirs) = (-1, -1);
        // SAFETY: two out-pointers and a size that live across the call; no name and no settings are asked for.
        let rc = unsafe {
            libc::openpty(
                &mut ours,
                &mut theirs,
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                (&raw const size).cast_mut(),
            )
        };
        ensure!(rc == 0, "openpty: {}", std::io::Error::last_os_error());
        // SAFETY: the call has just opened both for us.
        let (ours, theirs) = unsafe {
            (
                std::fs::File::from_raw_fd(ours),
                std::fs::File::from_raw_fd(theirs),
            )
        };
        let written = std::sync::Arc::<std::sync::Mutex<Vec<u8>>>::default();
        let (mut source, sink) = (ours.try_clone()?, written.clone());
        // Ends with an error when the other end is closed everywhere.
        std::thread::spawn(move || {
            let mut buf = [0; 4096];
            while let Ok(n) = source.read(&mut buf) {
                sink.lock().unwrap().extend(&buf[..n]);
            }
        });
        Ok(Terminal {
            ours,
            theirs,
            written,
        })
    }

    /// How it treats what is typed and shown.
    fn settings(&self) -> Result<[libc::tcflag_t; 4]> {
        use std::os::fd::AsRawFd;
        let mut now = std::mem::MaybeUninit::<libc::termios>::uninit();
        // SAFETY: an out-pointer that lives across the call.
        let rc = unsafe { libc::tcgetattr(self.theirs.as_raw_fd(), now.as_mut_ptr()) };
        ensure!(rc == 0, "tcgetattr: {}", std::io::Error::last_os_error());
        // SAFETY: the call has filled it.
        let now = unsafe { now.assume_init() };
        Ok([now.c_iflag, now.c_oflag, now.c_cflag, now.c_lflag])
    }

    fn shows(&self, what: &str) -> bool {
        String::from_utf8_lossy(&self.written.lock().unwrap()).contains(what)
    }
}

/// `hearth top` shows what disks do, and leaves the terminal as it found it, by a key and by a signal.
#[test]
fn top_gives_the_terminal_back() -> Result<()> {
    use std::io::Write;
    const LIMIT: std::time::Duration = std::time::Duration::from_secs(60);
    let hearth = Hearth::serving("128M")?;
    let origin = hearth.origin("o.img", 8 << 20)?;
    hearth.add("disk-of-top", path(&origin), &[])?;
    for by_key in [true, false] {
        let terminal = Terminal::open()?;
        let before = terminal.settings()?;
        let mut top = std::process::Command::new(hearth_rig::daemon::binary()?)
            .arg("--run-dir")
            .arg(hearth.run_dir())
            .args(["top", "--interval", "0.2"])
            .env("TERM", "xterm")
            .stdin(terminal.theirs.try_clone()?)
            .stdout(terminal.theirs.try_clone()?)
            .stderr(terminal.theirs.try_clone()?)
            .spawn()?;
        let seen = hearth_rig::wait::until("the disk is shown", LIMIT, || {
            // Blanks are steps of the cursor: words stand alone.
            (terminal.shows("disk-of-top") && terminal.shows("sort")).then_some(())
        });
        let taken = terminal.settings()? != before && terminal.shows("\x1b[?1049h");
        if by_key {
            (&terminal.ours).write_all(b"q")?;
        } else {
            // SAFETY: a signal to a child that has not been waited for, so its pid is still its own.
            unsafe { libc::kill(top.id() as i32, libc::SIGTERM) };
        }
        let ended =
            hearth_rig::wait::until("hearth top ends", LIMIT, || top.try_wait().ok().flatten());
        if ended.is_err() {
            top.kill()?;
            top.wait()?;
        }
        seen?;
        ensure!(taken, "it did not take the screen");
        ensure!(ended?.success(), "hearth top failed");
        ensure!(
            terminal.settings()? == before,
            "the terminal is not as it was"
        );
        hearth_rig::wait::until("the screen is given back", LIMIT, || {
            terminal.shows("\x1b[?1049l").then_some(())
        })?;
    }
    // Scripts get a line.
    let sample: serde_json::Value =
        serde_json::from_str(&hearth.ok(&["top", "--json", "--once", "--interval", "0.2"])?)?;
    ensure!(sample["disks"][0]["name"] == "disk-of-top", "{sample}");
    let words = hearth.refused(&["top"])?;
    ensure!(words.contains("--json"), "{words}");
    Ok(())
}

/// Bytes that cached data can take, the same number in every output.
#[test]
fn capacity_is_one_number_everywhere() -> Result<()> {
    let hearth = Hearth::serving("128M")?;
    let capacity = hearth.pool_stats()?["capacity"].as_u64();
    let shown: Value = serde_json::from_str(&hearth.ok(&["pool", "show", "--json"])?)?;
    ensure!(capacity.is_some_and(|bytes| bytes > 0), "{capacity:?}");
    ensure!(shown["capacity"].as_u64() == capacity, "{shown}");
    ensure!(shown["log_bytes"].as_u64() > capacity, "{shown}");
    let figures = hearth.ok(&["metrics"])?;
    let figure = figures.lines().find_map(|line| {
        let value = line.strip_prefix("hearth_pool_capacity_bytes")?;
        value.rsplit(' ').next()?.parse::<f64>().ok()
    });
    ensure!(figure == capacity.map(|bytes| bytes as f64), "{figure:?}");
    Ok(())
}

#[test]
fn all_disks_are_flushed_at_once() -> Result<()> {
    let hearth = Hearth::serving("128M")?;
    for name in ["one", "two"] {
        let origin = hearth.origin(&format!("{name}.raw"), MIB)?;
        hearth.add(name, path(&origin), &[])?;
        let mut client = hearth.connect(name)?;
        client.write(0, &[7; 4096])?;
        client.flush()?;
    }
    hearth.ok(&["disk", "flush", "--all"])?;
    for name in ["one", "two"] {
        ensure!(shown(&hearth, name)?["dirty"] == 0);
        let origin = std::fs::read(hearth.dir().join(format!("{name}.raw")))?;
        ensure!(origin[..4096] == [7; 4096], "{name}");
    }
    Ok(())
}
