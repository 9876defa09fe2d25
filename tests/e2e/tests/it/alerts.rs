//! Alerts reach people: through real mail servers with TLS and passwords, after they were away, over
//! restarts of the second service.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hearth_rig::monitor::Monitor;
use hearth_rig::{Hearth, wait};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

/// A busy machine takes its time.
const LIMIT: Duration = Duration::from_secs(300);
const PASSWORD: &str = "correct-horse-battery";

fn private(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text)?;
    Ok(fs::set_permissions(
        path,
        fs::Permissions::from_mode(0o600),
    )?)
}

/// Where a mail server will be, and who signs for it.
struct Post {
    dir: PathBuf,
    mode: &'static str,
    port: u16,
}

/// A mail server. Killed when dropped.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Post {
    fn new(hearth: &Hearth, mode: &'static str) -> Result<Post> {
        let dir = hearth.dir().join("post");
        fs::create_dir(&dir)?;
        let mut params = CertificateParams::new(vec![])?;
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
        let key = KeyPair::generate()?;
        let cert = CertificateParams::new(vec!["localhost".to_owned()])?;
        let cert = cert.signed_by(&key, &authority)?;
        fs::write(dir.join("ca.pem"), authority.pem())?;
        fs::write(dir.join("cert.pem"), cert.pem())?;
        fs::write(dir.join("key.pem"), key.serialize_pem())?;
        private(&dir.join("password"), &format!("{PASSWORD}\n"))?;
        // Free when asked for, and hardly taken by another at once.
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        Ok(Post { dir, mode, port })
    }

    /// The second service's configuration, with more settings.
    fn config(&self, more: &str) -> Result<String> {
        let path = self.dir.join("hearth.toml");
        let dir = self.dir.display();
        fs::write(
            &path,
            format!(
                "[alerts]\nhost = 'host1'\ngather_seconds = 0\nretry_seconds = 1\n{more}\n\
                 [alerts.mail]\nto = ['ops@example.org', 'night@example.org']\nserver = 'localhost'\n\
                 port = {}\nsecurity = '{}'\nuser = 'hearth'\npassword_file = '{dir}/password'\nca_file = '{dir}/ca.pem'\n",
                self.port, self.mode
            ),
        )?;
        Ok(path.to_str().context("a path is not UTF-8")?.to_owned())
    }

    fn open(&self) -> Result<Server> {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("smtp-server.py");
        let child = Command::new("/usr/bin/python3")
            .arg(script)
            .args([self.mode, &self.port.to_string()])
            .arg(&self.dir)
            .arg(self.dir.join("cert.pem"))
            .arg(self.dir.join("key.pem"))
            .args(["hearth", PASSWORD])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut server = Server(child);
        let mut line = String::new();
        let out = server.0.stdout.take().context("no standard output")?;
        BufReader::new(out).read_line(&mut line)?;
        ensure!(line == "ready\n", "the mail server did not start");
        Ok(server)
    }

    fn mails(&self) -> Vec<String> {
        let mails = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let mut mails: Vec<PathBuf> = mails
            .map(|entry| entry.path())
            .filter(|path| path.extension().is_some_and(|e| e == "mail"))
            .collect();
        mails.sort();
        let text = |path: &PathBuf| fs::read_to_string(path).unwrap_or_default();
        mails.iter().map(text).collect()
    }

    fn arrived(&self, words: &str, count: usize) -> Result<Vec<String>> {
        wait::until(&format!("{count} mails say {words}"), LIMIT, || {
            let mails = self.mails().into_iter().filter(|m| m.contains(words));
            let mails: Vec<String> = mails.collect();
            (mails.len() >= count).then_some(mails)
        })
    }
}

fn have_server() -> bool {
    let there = Command::new("/usr/bin/python3")
        .args(["-c", "import aiosmtpd"])
        .stderr(Stdio::null())
        .status();
    let there = there.is_ok_and(|s| s.success());
    if !there {
        eprintln!("skipped: no aiosmtpd; scripts/setup.sh test installs it");
    }
    there
}

/// Nothing that the service wrote has the password in it.
fn nothing_tells_the_password(hearth: &Hearth, monitor: &Monitor) -> Result<()> {
    ensure!(
        !monitor.log().contains(PASSWORD),
        "the log has the password"
    );
    let mut dirs = vec![hearth.dir().join("monitor")];
    while let Some(dir) = dirs.pop() {
        for entry in fs::read_dir(dir)? {
            let path = entry?.path();
            if path.is_dir() {
                dirs.push(path);
                continue;
            }
            let text = fs::read(path)?;
            let text = String::from_utf8_lossy(&text);
            ensure!(!text.contains(PASSWORD), "a file has the password");
        }
    }
    Ok(())
}

#[test]
fn a_mail_server_that_is_away_loses_no_alert_over_restarts() -> Result<()> {
    if !have_server() {
        return Ok(());
    }
    let mut hearth = Hearth::serving("64M")?;
    let post = Post::new(&hearth, "starttls")?;
    // However long this machine takes to start it again: here it is the crash that is told.
    let config = post.config("down_seconds = 600")?;
    let monitor = Monitor::start(&hearth, &["--config", &config])?;
    // It has read where the daemon's events end.
    let begun = hearth.dir().join("monitor/alerts.json");
    wait::until("events are followed", LIMIT, || {
        fs::read_to_string(&begun)
            .ok()
            .filter(|text| text.contains("\"begun\":true"))
    })?;
    hearth.kill9()?;
    hearth.start()?;
    let waiting = monitor.until("a message waits", "/v1/alerts", |info| {
        let ways = info["ways"].as_array().into_iter().flatten();
        ways.filter(|way| way["error"].is_string()).count() == 2
    })?;
    let subject = waiting["waiting"][0]["subject"]
        .as_str()
        .unwrap_or_default();
    ensure!(subject.contains("after a crash"), "{waiting}");
    let list = hearth.ok(&["alert", "list"])?;
    ensure!(
        list.contains("mail:ops@example.org: 1 messages wait"),
        "{list}"
    );
    monitor.end()?;

    let monitor = Monitor::start(&hearth, &["--config", &config])?;
    let _server = post.open()?;
    let mails = post.arrived("after a crash", 2)?;
    let to: Vec<&str> = mails.iter().filter_map(|m| m.lines().next()).collect();
    ensure!(
        to.contains(&"ops@example.org") && to.contains(&"night@example.org"),
        "{to:?}"
    );
    ensure!(
        mails[0].contains("Subject: [hearth host1] event: daemon hearth"),
        "{}",
        mails[0]
    );

    let said = hearth.ok(&["alert", "test"])?;
    ensure!(said.contains("mail:night@example.org: arrived"), "{said}");
    ensure!(
        post.arrived("somebody tries whether alerts arrive", 2)?
            .len()
            == 2
    );
    ensure!(
        post.mails().len() == 4,
        "each arrived once: {:#?}",
        post.mails()
    );
    // It is on record, among what the daemon tells, and over a restart of both.
    monitor.end()?;
    let monitor = Monitor::start(&hearth, &["--config", &config])?;
    // Before it answers, the daemon's are all there are.
    monitor.until("it answers", "/v1/alerts", |_| true)?;
    let events = hearth.ok(&["events", "--json"])?;
    let told = |name: &str| -> Vec<serde_json::Value> {
        let name = format!("\"event\":\"{name}\"");
        let lines = events.lines().filter(|line| line.contains(&name));
        lines.filter_map(|l| serde_json::from_str(l).ok()).collect()
    };
    let sent = told("alert-sent");
    ensure!(sent.len() == 4, "{events}");
    // The ways go by themselves; on each, messages go in order.
    let by_night = |e: &&serde_json::Value| e["details"]["way"] == "mail:night@example.org";
    let first = sent.iter().find(by_night).context("none by night")?;
    ensure!(first["details"]["attempts"].as_u64() > Some(1), "{events}");
    ensure!(told("daemon-started-after-crash").len() == 1, "{events}");
    nothing_tells_the_password(&hearth, &monitor)?;
    monitor.end()
}

/// More to tell than messages an hour is on record, and so is what a way that is configured no longer was to get.
#[test]
fn what_is_held_back_or_given_up_is_on_record() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    let dir = hearth.dir().to_owned();
    let write = |name: &str, to: &str| -> Result<String> {
        let path = dir.join(name);
        // Nobody listens there.
        let text =
            format!("[alerts]\ngather_seconds = 0\nmost_per_hour = 1\ndown_seconds = 600\n{to}\n");
        fs::write(&path, text)?;
        Ok(path.to_str().context("a path is not UTF-8")?.to_owned())
    };
    let config = write(
        "one.toml",
        "[alerts.mail]\nto = ['ops@example.org']\nserver = '127.0.0.1'\nport = 9\nsecurity = 'none'",
    )?;
    let monitor = Monitor::start(&hearth, &["--config", &config])?;
    let begun = dir.join("monitor/alerts.json");
    wait::until("events are followed", LIMIT, || {
        let text = fs::read_to_string(&begun).ok()?;
        text.contains("\"begun\":true").then_some(())
    })?;
    for crash in 0..2 {
        hearth.kill9()?;
        hearth.start()?;
        monitor.until("it is followed", "/v1/alerts", |info| {
            info["waiting"].as_array().is_some_and(|w| !w.is_empty()) || crash > 0
        })?;
    }
    let told = |name: &str| -> Result<serde_json::Value> {
        wait::until(name, LIMIT, || {
            let events = hearth.ok(&["events", "--json"]).ok()?;
            let mut lines = events.lines().filter_map(|l| serde_json::from_str(l).ok());
            lines.find(|e: &serde_json::Value| e["event"] == name)
        })
    };
    let held = told("alerts-held-back")?;
    ensure!(held["details"]["most_per_hour"] == 1, "{held}");
    monitor.end()?;
    let monitor = Monitor::start(&hearth, &["--config", &write("none.toml", "")?])?;
    let given_up = told("alert-given-up")?;
    ensure!(
        given_up["details"]["way"] == "mail:ops@example.org",
        "{given_up}"
    );
    monitor.end()
}

/// A program that takes a message and says nothing: the next message goes to phones while it is still being waited for.
#[test]
fn way_that_hangs_holds_up_no_other() -> Result<()> {
    let hearth = Hearth::serving("64M")?;
    let (silent, phones) = (
        TcpListener::bind("127.0.0.1:0")?,
        TcpListener::bind("127.0.0.1:0")?,
    );
    let file = hearth.dir().join("ways.toml");
    let ways = format!(
        "[alerts]\n[alerts.webhook]\nurl = 'http://{}/x'\n[alerts.ntfy]\nurl = 'http://{}/t'\n",
        silent.local_addr()?,
        phones.local_addr()?
    );
    fs::write(&file, ways)?;
    let file = file.to_str().context("a path is not UTF-8")?;
    let monitor = Monitor::start(&hearth, &["--config", file])?;
    monitor.until("it answers", "/v1/alerts", |_| true)?;
    phones.set_nonblocking(true)?;
    let mut asked = Vec::new();
    for _ in 0..2 {
        asked.push(hearth.begin(&["alert", "test"])?);
        let (mut stream, _) = wait::until("a phone is told", LIMIT, || phones.accept().ok())?;
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(LIMIT))?;
        BufReader::new(&stream).read_line(&mut String::new())?;
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")?;
    }
    let (mut first, _) = silent.accept()?;
    first.set_nonblocking(true)?;
    let mut bytes = [0; 4096];
    let waits = loop {
        match first.read(&mut bytes) {
            Ok(0) => break false,
            Ok(_) => {}
            Err(e) => break e.kind() == std::io::ErrorKind::WouldBlock,
        }
    };
    ensure!(
        waits,
        "the first message was given up before the second one was sent"
    );
    for mut client in asked {
        client.kill()?;
        client.wait()?;
    }
    drop((first, silent));
    monitor.end()
}

/// Only somebody elsewhere can tell of a dead host: who waits for a sign of life gets one, from the start on.
#[test]
fn whoever_waits_for_a_sign_of_life_gets_one() -> Result<()> {
    let hearth = Hearth::serving("64M")?;
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let file = hearth.dir().join("beat.toml");
    let url = format!("http://{}/beat/kvm1", listener.local_addr()?);
    fs::write(&file, format!("[alerts]\nheartbeat_url = '{url}'\n"))?;
    listener.set_nonblocking(true)?;
    let file = file.to_str().context("a path is not UTF-8")?;
    let monitor = Monitor::start(&hearth, &["--config", file])?;
    let (mut stream, _) = wait::until("somebody connects", LIMIT, || listener.accept().ok())?;
    stream.set_nonblocking(false)?;
    stream.set_read_timeout(Some(LIMIT))?;
    let mut request = String::new();
    BufReader::new(&stream).read_line(&mut request)?;
    ensure!(request.starts_with("GET /beat/kvm1 "), "{request}");
    stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")?;
    monitor.end()
}

/// Exim as a site has it: it speaks TLS by a library that is not ours, and takes mail only with it and with a password. It
/// is not installed for this, since it would take the place of a mail server that is there.
struct Exim {
    _server: Server,
    mails: PathBuf,
    _dir: tempfile::TempDir,
}

impl Exim {
    fn open(post: &Post) -> Result<Exim> {
        // Its own user has to get there.
        let dir = tempfile::tempdir()?;
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755))?;
        let at = dir.path().display();
        for name in ["spool", "mails"] {
            fs::create_dir(dir.path().join(name))?;
            fs::set_permissions(dir.path().join(name), fs::Permissions::from_mode(0o777))?;
        }
        for name in ["cert.pem", "key.pem"] {
            fs::copy(post.dir.join(name), dir.path().join(name))?;
            fs::set_permissions(dir.path().join(name), fs::Permissions::from_mode(0o644))?;
        }
        let at_once = match post.mode {
            "tls" => format!("tls_on_connect_ports = {}", post.port),
            _ => String::new(),
        };
        let text = format!(
            "primary_hostname = localhost\nspool_directory = {at}/spool\nlog_file_path = {at}/spool/%slog\n\
             pid_file_path = {at}/spool/pid\ntls_advertise_hosts = *\ntls_certificate = {at}/cert.pem\n\
             tls_privatekey = {at}/key.pem\n{at_once}\nacl_smtp_mail = mail\nacl_smtp_rcpt = rcpt\n\
             auth_advertise_hosts = ${{if eq{{$tls_in_cipher}}{{}}{{}}{{*}}}}\n\
             begin acl\nmail:\n  deny !encrypted = *\n  deny !authenticated = *\n  accept\nrcpt:\n  accept\n\
             begin routers\nall:\n  driver = accept\n  transport = keep\n\
             begin transports\nkeep:\n  driver = appendfile\n  directory = {at}/mails\n  user = Debian-exim\n  mode = 0644\n\
             begin authenticators\nplain:\n  driver = plaintext\n  public_name = PLAIN\n  server_prompts = :\n  \
             server_condition = ${{if and{{{{eq{{$auth2}}{{hearth}}}}{{eq{{$auth3}}{{{PASSWORD}}}}}}}}}\n  server_set_id = $auth2\n"
        );
        let conf = dir.path().join("conf");
        fs::write(&conf, text)?;
        let child = Command::new("exim4")
            .arg("-C")
            .arg(&conf)
            .args(["-bdf", "-oX", &format!("127.0.0.1.{}", post.port)])
            .stdin(Stdio::null())
            .spawn()?;
        let server = Server(child);
        wait::until("exim listens", LIMIT, || {
            std::net::TcpStream::connect(("127.0.0.1", post.port)).ok()
        })?;
        let mails = dir.path().join("mails");
        Ok(Exim {
            _server: server,
            mails,
            _dir: dir,
        })
    }
}

#[test]
fn a_mail_server_of_a_site_takes_them() -> Result<()> {
    // SAFETY: no arguments, and it cannot fail.
    let root = unsafe { libc::geteuid() } == 0;
    if !root || !hearth_rig::clients::have("alerts: exim (as root)", &["exim4"]) {
        return Ok(());
    }
    for mode in ["starttls", "tls"] {
        let hearth = Hearth::serving("64M")?;
        let post = Post::new(&hearth, mode)?;
        let exim = Exim::open(&post)?;
        let monitor = Monitor::start(&hearth, &["--config", &post.config("")?])?;
        monitor.link_is("up")?;
        hearth.ok(&["alert", "test"])?;
        let post = Post {
            dir: exim.mails.clone(),
            ..post
        };
        wait::until("it lies in the mailbox", LIMIT, || {
            let files = fs::read_dir(&post.dir).ok()?.flatten();
            let mut texts = files.filter_map(|file| fs::read_to_string(file.path()).ok());
            texts
                .any(|text| text.contains("somebody tries"))
                .then_some(())
        })?;
        nothing_tells_the_password(&hearth, &monitor)?;
        monitor.end()?;
    }
    Ok(())
}

#[test]
fn a_wrong_password_is_said_and_the_right_one_is_taken_without_a_restart() -> Result<()> {
    if !have_server() {
        return Ok(());
    }
    let hearth = Hearth::serving("64M")?;
    let post = Post::new(&hearth, "tls")?;
    private(&post.dir.join("password"), "wrong\n")?;
    let _server = post.open()?;
    let monitor = Monitor::start(&hearth, &["--config", &post.config("")?])?;
    monitor.link_is("up")?;
    let said = hearth.refused(&["alert", "test"])?;
    ensure!(said.contains("2 of 2 tests did not arrive"), "{said}");
    let info = monitor.get("/v1/alerts")?;
    let error = info["ways"][0]["error"].as_str().unwrap_or_default();
    ensure!(
        error.contains("localhost did not take it") && error.contains("535"),
        "{info}"
    );
    private(&post.dir.join("password"), PASSWORD)?;
    post.arrived("somebody tries", 2)?;
    // A file that others can read is not.
    fs::set_permissions(post.dir.join("password"), fs::Permissions::from_mode(0o644))?;
    hearth.refused(&["alert", "test"])?;
    let info = monitor.get("/v1/alerts")?;
    let error = info["ways"][0]["error"].as_str().unwrap_or_default();
    ensure!(error.contains("chmod 600"), "{info}");
    nothing_tells_the_password(&hearth, &monitor)?;
    monitor.end()
}

#[test]
fn a_failing_drive_under_a_disk_and_a_daemon_that_is_gone_are_mailed() -> Result<()> {
    if !have_server() {
        return Ok(());
    }
    let mut hearth = Hearth::serving("64M")?;
    let post = Post::new(&hearth, "starttls")?;
    let _server = post.open()?;
    // smartctl as it is about an NVMe drive that takes no writes any more.
    let programs = hearth.dir().join("bin");
    fs::create_dir(&programs)?;
    let recorded = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../crates/health/recorded/smart-nvme-read-only.json");
    let smartctl = programs.join("smartctl");
    let mut script = fs::File::create(&smartctl)?;
    writeln!(script, "#!/bin/sh\ncat '{}'\nexit 8", recorded.display())?;
    drop(script);
    fs::set_permissions(&smartctl, fs::Permissions::from_mode(0o755))?;
    let config = post.config("down_seconds = 3\nover_seconds = 8")?;
    let monitor = Monitor::start_with(&hearth, &["--config", &config], Some(&programs))?;
    let report = monitor.until("devices are judged", "/v1/health", |report| {
        let mut items = report["items"].as_array().into_iter().flatten();
        items.any(|i| i["kind"] == "file-system")
    })?;
    let mut items = report["items"].as_array().into_iter().flatten();
    if items.any(|i| i["kind"] == "device") {
        let mails = post.arrived("takes no writes", 2)?;
        ensure!(
            mails[0].contains("What to do: replace the drive"),
            "{}",
            mails[0]
        );
        let out = hearth.hearth(&["status"])?;
        let status = String::from_utf8(out.stdout)?;
        ensure!(out.status.code() == Some(1), "health is failed: {status}");
        ensure!(status.contains("takes no writes any more"), "{status}");
    } else {
        eprintln!("the test directory lies on no drive of this host; the drive's part is skipped");
    }
    hearth.kill9()?;
    let mails = post.arrived("the daemon is not there", 2)?;
    ensure!(
        mails[0].contains("[hearth host1] failed: daemon hearth"),
        "{}",
        mails[0]
    );
    hearth.start()?;
    post.arrived("What is over", 2)?;
    monitor.end()
}
