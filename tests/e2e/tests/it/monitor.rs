//! The second service beside a daemon that lives, hangs and dies.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use hearth_rig::daemon::path;
use hearth_rig::monitor::Monitor;
use hearth_rig::{Hearth, wait};
use serde_json::Value;

fn signal(pid: u32, signal: i32) {
    // SAFETY: kill touches no memory; the process is our child and was not waited for.
    unsafe { libc::kill(pid as i32, signal) };
}

#[test]
fn it_tells_a_daemon_that_hangs_from_one_that_is_gone_and_finds_it_again() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    let monitor = Monitor::start(&hearth, &[])?;
    monitor.link_is("up")?;
    let pid = hearth.pid().expect("serving");
    signal(pid, libc::SIGSTOP);
    let info = monitor.link_is("hanging")?;
    signal(pid, libc::SIGCONT);
    let error = info["daemon"]["error"].as_str().unwrap_or_default();
    ensure!(error.contains("has not answered"), "{info}");
    monitor.link_is("up")?;
    hearth.kill9()?;
    let info = monitor.link_is("down")?;
    ensure!(info["daemon"]["seen"].as_u64().is_some(), "{info}");
    hearth.start()?;
    let info = monitor.link_is("up")?;
    for part in info["parts"].as_array().into_iter().flatten() {
        ensure!(part["restarts"] == 0 && part["running"] == true, "{info}");
    }
    monitor.end()?;
    // The daemon has not noticed.
    hearth.ok(&["disk", "list"])?;
    Ok(())
}

/// A RAID controller hides its drives behind one device: each is asked with a type of its own.
#[test]
fn drives_behind_controller_are_judged_one_by_one() -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let hearth = Hearth::serving("64M")?;
    let programs = hearth.dir().join("bin");
    std::fs::create_dir(&programs)?;
    let smartctl = programs.join("smartctl");
    let script = r#"#!/bin/sh
case "$*" in
*--scan*) echo '{"devices":[{"name":"/dev/bus/999","type":"megaraid,0"}]}' ;;
*"-d megaraid,1 "*) echo '{"model_name":"Bad","smart_status":{"passed":false}}'; exit 8 ;;
*"-d "*) echo '{"model_name":"Good","smart_status":{"passed":true}}' ;;
*) echo '{"smartctl":{"messages":[{"string":"please try adding -d megaraid,N"}]}}'; exit 2 ;;
esac
"#;
    std::fs::write(&smartctl, script)?;
    std::fs::set_permissions(&smartctl, std::fs::Permissions::from_mode(0o755))?;
    let devices = |report: &Value| -> Vec<Value> {
        let items = report["items"].as_array().into_iter().flatten();
        items.filter(|i| i["kind"] == "device").cloned().collect()
    };
    let judged = |args: &[&str]| -> Result<Vec<Value>> {
        let monitor = Monitor::start_with(&hearth, args, Some(&programs))?;
        let report = monitor.until("devices are judged", "/v1/health", |report| {
            let mut items = report["items"].as_array().into_iter().flatten();
            items.any(|i| i["kind"] == "file-system")
        })?;
        monitor.end()?;
        Ok(devices(&report))
    };
    let found = judged(&[])?;
    let Some(first) = found.first() else {
        println!("SKIPPED drives behind a controller: the test directory lies on no drive");
        return Ok(());
    };
    let reason = &first["reasons"][0];
    ensure!(
        first["condition"] == "unknown" && reason["code"] == "smart-none",
        "{first}"
    );
    ensure!(
        reason["remedy"]
            .as_str()
            .is_some_and(|r| r.contains("[drives]")),
        "{first}"
    );
    let name = first["name"].as_str().context("a name")?;
    let config = hearth.dir().join("hearth.toml");
    std::fs::write(
        &config,
        format!("[drives]\n{name} = [\"megaraid,0\", \"megaraid,1\"]\n"),
    )?;
    let found = judged(&["--config", path(&config)])?;
    for (kind, condition, model) in [
        ("megaraid,0", "healthy", "Good"),
        ("megaraid,1", "failed", "Bad"),
    ] {
        let called = format!("{name} {kind}");
        let item = found.iter().find(|i| i["name"] == called.as_str());
        let item = item.with_context(|| format!("no {called} in {found:?}"))?;
        ensure!(
            item["condition"] == condition && item["about"] == model,
            "{item}"
        );
    }
    Ok(())
}

#[test]
fn it_starts_before_the_daemon_and_two_of_them_do_not_share_a_directory() -> Result<()> {
    let mut hearth = Hearth::with_pool("64M")?;
    let monitor = Monitor::start(&hearth, &[])?;
    monitor.link_is("down")?;
    let said = Monitor::start(&hearth, &[])?.refused()?;
    ensure!(said.contains("another `hearth monitor` is using"), "{said}");
    hearth.start()?;
    monitor.link_is("up")?;
    monitor.end()
}

#[test]
fn prometheus_is_answered_over_tcp_while_the_daemon_comes_and_goes() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    // Free when asked for, and hardly taken by another at once.
    let at = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let config = hearth.dir().join("hearth.toml");
    std::fs::write(&config, format!("[metrics]\nlisten = '{at}'\n"))?;
    let monitor = Monitor::start(&hearth, &["--config", path(&config)])?;
    let says = |words: &str| {
        let what = format!("a scrape says {words}");
        wait::until(&what, Duration::from_secs(120), || {
            let mut stream = TcpStream::connect(at).ok()?;
            let request = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
            stream.write_all(request).ok()?;
            let mut page = String::new();
            stream.read_to_string(&mut page).ok()?;
            page.contains(words).then_some(())
        })
    };
    says("hearth_health{kind=\"daemon\",name=\"hearth\"} 0")?;
    hearth.kill9()?;
    says("HTTP/1.1 503")?;
    hearth.start()?;
    says("hearth_build_info")?;
    // It waits for a client then, and ends all the same.
    monitor.end()?;
    // What other hosts reach is not opened by mistake.
    std::fs::write(&config, "[metrics]\nlisten = '0.0.0.0:9'\n")?;
    let said = Monitor::start(&hearth, &["--config", path(&config)])?.refused()?;
    ensure!(said.contains("allow_remote"), "{said}");
    Ok(())
}

#[test]
fn health_tells_a_daemon_that_was_stopped_from_one_that_was_killed() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    let origin = hearth.origin("vm1", 1 << 20)?;
    hearth.add("vm1", hearth_rig::daemon::path(&origin), &[])?;
    let monitor = Monitor::start(&hearth, &[])?;
    let judged = |kind: &'static str, code: &'static str| {
        monitor.until(code, "/v1/health", move |report| {
            let items = report["items"].as_array().into_iter().flatten();
            items
                .filter(|i| i["kind"] == kind)
                .flat_map(|i| i["reasons"].as_array().into_iter().flatten())
                .any(|r| r["code"] == code)
        })
    };
    let well = monitor.until("the disk is judged", "/v1/health", |report| {
        let items = report["items"].as_array().into_iter().flatten();
        let disks = |i: &&serde_json::Value| i["kind"] == "disk" && i["condition"] == "healthy";
        items.filter(disks).count() == 1
    })?;
    ensure!(well["condition"] != "failed", "{well}");
    let status = hearth.ok(&["status"])?;
    ensure!(
        status.contains("vm1") && status.contains("is it helping?"),
        "{status}"
    );
    ensure!(!status.contains("second service is not there"), "{status}");
    let out = hearth.hearth(&["health"])?;
    ensure!(matches!(out.status.code(), Some(0 | 1)), "{out:?}");
    // One number under one name, wherever it is asked.
    let json = |args: &[&str]| -> Result<serde_json::Value> {
        Ok(serde_json::from_str(
            &hearth.ok(&[args, &["--json"]].concat())?,
        )?)
    };
    let capacity = json(&["stats"])?["pool"]["capacity"].clone();
    ensure!(capacity.as_u64() > Some(0), "{capacity}");
    ensure!(json(&["pool", "show"])?["capacity"] == capacity);
    ensure!(json(&["status"])?["pool"]["capacity"] == capacity);
    ensure!(json(&["advise"])?["capacity"] == capacity);
    let metrics = json(&["metrics"])?;
    let families = metrics["metrics"].as_array().context("families")?;
    let family = families
        .iter()
        .find(|f| f["name"] == "hearth_pool_capacity_bytes");
    let value = family.context("no capacity")?["samples"][0]["value"].as_f64();
    ensure!(value == capacity.as_f64(), "{value:?}");

    hearth.kill9()?;
    judged("daemon", "daemon-down")?;
    let out = hearth.hearth(&["status", "--json"])?;
    ensure!(!out.status.success(), "there is no daemon");
    let json: serde_json::Value = serde_json::from_slice(&out.stdout)?;
    ensure!(
        json["condition"] == "failed" && json["monitor"] == true,
        "{json}"
    );
    hearth.start()?;
    monitor.link_is("up")?;
    hearth.stop()?;
    judged("daemon", "daemon-stopped")?;
    hearth.start()?;

    // A disk whose origin goes away while nobody serves it.
    hearth.stop()?;
    std::fs::remove_file(&origin)?;
    hearth.start()?;
    judged("disk", "disk-waiting")?;
    // What only the second service judges is there, too, unless it took its time to answer.
    wait::until(
        "health is among the metrics",
        Duration::from_secs(60),
        || {
            let metrics = hearth.ok(&["metrics"]).ok()?;
            let all = [
                "hearth_health{kind=\"disk\",name=\"vm1\"} 4",
                "hearth_health{kind=\"host\",name=\"this host\"} ",
                "hearth_health{kind=\"pool\"",
            ];
            all.iter().all(|h| metrics.contains(h)).then_some(())
        },
    )?;
    monitor.end()?;
    let out = hearth.hearth(&["status"])?;
    ensure!(out.status.code() == Some(1), "health is failed: {out:?}");
    let status = String::from_utf8(out.stdout)?;
    ensure!(status.contains("second service is not there"), "{status}");
    // The same for monitoring programs.
    let out = hearth.hearth(&["health"])?;
    let line = String::from_utf8(out.stdout)?;
    ensure!(out.status.code() == Some(2), "{line}");
    let start = "HEARTH CRITICAL - disk vm1: ";
    ensure!(
        line.starts_with(start) && line.lines().count() == 1,
        "{line}"
    );
    let out = hearth.hearth(&["health", "--json"])?;
    let json: serde_json::Value = serde_json::from_slice(&out.stdout)?;
    ensure!(
        json["state"] == "CRITICAL" && json["exit_status"] == 2,
        "{json}"
    );
    ensure!(
        status.starts_with("health: failed") && status.contains("not served"),
        "{status}"
    );
    Ok(())
}

/// Waits until the second service has looked at the statistics twice from now on: what is counted after that is
/// of a known time.
fn looked(monitor: &Monitor) -> Result<()> {
    let path = "/v1/history/disks?since=86400";
    let seconds = |sums: &Value| sums["pool"]["seconds"].as_f64().unwrap_or(0.0);
    let before = seconds(&monitor.until("statistics", path, |_| true)?);
    monitor.until("statistics go on", path, |sums| {
        let disks = sums["disks"].as_array().into_iter().flatten();
        seconds(sums) > before && disks.into_iter().any(|d| d["name"] == "vm1")
    })?;
    Ok(())
}

/// Writes of the disk that the second service remembers.
fn remembered(hearth: &Hearth) -> u64 {
    let out = hearth.hearth(&["stats", "--since", "1h", "--json"]);
    let json = out
        .ok()
        .and_then(|out| serde_json::from_slice(&out.stdout).ok());
    let json: Value = json.unwrap_or_default();
    let disks = json["disks"].as_array().cloned().unwrap_or_default();
    let disk = disks.into_iter().find(|d| d["name"] == "vm1");
    disk.map_or(0, |d| d["counted"]["writes"].as_u64().unwrap_or(0))
}

#[test]
fn what_disks_did_is_remembered_over_kills_of_both() -> Result<()> {
    let mut hearth = Hearth::serving("64M")?;
    let origin = hearth.origin("vm1", 4 << 20)?;
    hearth.add("vm1", hearth_rig::daemon::path(&origin), &[])?;
    let said = hearth.refused(&["stats", "--since", "24h"])?;
    ensure!(said.contains("kept by the second service"), "{said}");
    let monitor = Monitor::start(&hearth, &[])?;
    // What was counted before the first look is of no known time.
    looked(&monitor)?;
    let writes = |hearth: &Hearth, count: u64| -> Result<()> {
        let mut client = hearth.connect("vm1")?;
        for n in 0..count {
            client.write(n % 1000 * 4096, &[7; 4096])?;
        }
        Ok(())
    };
    let limit = Duration::from_secs(120);
    let knows = |hearth: &Hearth, count: u64| {
        wait::until("all writes are remembered", limit, || {
            Some(remembered(hearth)).filter(|n| *n >= count)
        })
    };
    writes(&hearth, 300)?;
    ensure!(knows(&hearth, 300)? == 300);
    // Both are killed: what was asked for was in the files by then.
    drop(monitor);
    hearth.kill9()?;
    hearth.start()?;
    let monitor = Monitor::start(&hearth, &[])?;
    ensure!(knows(&hearth, 300)? == 300);
    monitor.link_is("up")?;
    looked(&monitor)?;
    writes(&hearth, 50)?;
    ensure!(knows(&hearth, 350)? == 350, "the daemon counts from zero");
    let table = hearth.ok(&["stats", "vm1", "--since", "30m"])?;
    ensure!(table.contains("WRITTEN"), "{table}");
    // A row ends when the clock says so: what was written may be in two.
    let rows: Value =
        serde_json::from_str(&hearth.ok(&["stats", "vm1", "--since", "30m", "--json"])?)?;
    let written = rows["columns"]["writes"].as_array().cloned();
    let written = written.unwrap_or_default();
    let written: u64 = written.iter().filter_map(Value::as_u64).sum();
    ensure!(written == 350, "{rows}");
    let said = hearth.refused(&["stats", "vm2", "--since", "30m"])?;
    ensure!(said.contains("nothing is known of a disk vm2"), "{said}");
    monitor.end()?;
    Ok(())
}
