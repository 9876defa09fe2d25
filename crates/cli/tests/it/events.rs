//! What happened, over kills, as the command line shows it.

use crate::common::{Bench, until};
use serde_json::Value;

fn events(bench: &Bench, args: &[&str]) -> Vec<Value> {
    let args: Vec<&str> = ["events", "--json"].iter().chain(args).copied().collect();
    let text = bench.ok(&args);
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

fn names(events: &[Value]) -> Vec<&str> {
    events
        .iter()
        .map(|e| e["event"].as_str().unwrap())
        .collect()
}

#[test]
fn a_day_in_the_life_of_a_daemon() {
    let mut bench = Bench::serving();
    let origin = bench.origin("o.img", 1 << 20, 1);
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    bench.ok(&[
        "disk",
        "set",
        "vm",
        "--mode",
        "write-through",
        "--min",
        "1M",
    ]);
    let before = events(&bench, &[]);
    assert_eq!(
        names(&before),
        [
            "daemon-started",
            "disk-attached",
            "disk-added",
            "disk-changed"
        ]
    );
    // SAFETY: geteuid has no preconditions and cannot fail.
    let me = match unsafe { libc::geteuid() } {
        0 => "root".to_owned(),
        uid => format!("user {uid}"),
    };
    assert_eq!(before[2]["details"]["by"], *me);
    assert_eq!(before[2]["details"]["origin"], *origin);
    let what = before[3]["details"]["what"].as_str().unwrap();
    assert!(
        what.contains("mode=write-through") && what.contains("min=1048576"),
        "{what}"
    );
    // A kill may come before the last of them is in the file.
    let kept = || std::fs::read_dir(bench.dir.path().join("state/events")).unwrap();
    until("the events are in the file", || {
        let files = kept().map(|f| std::fs::read_to_string(f.unwrap().path()).unwrap());
        files
            .collect::<String>()
            .contains("disk-changed")
            .then_some(())
    });
    bench.kill();
    std::fs::remove_file(&origin).unwrap();
    bench.start();
    let after = events(&bench, &[]);
    assert_eq!(after[..4], before[..]);
    assert_eq!(
        names(&after[4..]),
        ["disk-waiting", "daemon-started-after-crash"]
    );
    let ids: Vec<u64> = after.iter().map(|e| e["id"].as_u64().unwrap()).collect();
    assert_eq!(ids, (1..=6).collect::<Vec<_>>());
    // What is asked for, and nothing else.
    let of_disk = events(&bench, &["--disk", "vm", "--severity", "warning"]);
    assert_eq!(names(&of_disk), ["disk-waiting"]);
    assert_eq!(events(&bench, &["--since", "2h"]).len(), 6);
    assert_eq!(events(&bench, &["--limit", "2"]), after[4..]);
    let shown = bench.ok(&["events", "--disk", "vm", "--limit", "1"]);
    assert!(
        shown.contains("  warning  disk-waiting  vm: waiting: "),
        "{shown}"
    );
    assert!(
        bench
            .refused(&[
                "events",
                "--limit",
                "5",
                "--disk",
                "no such/disk&x=1",
                "--run-dir",
                "/nowhere"
            ])
            .contains("no hearth daemon")
    );
    assert_eq!(
        events(&bench, &["--disk", "no such/disk&x=1"]),
        [] as [Value; 0]
    );
    bench.stop();
    bench.start();
    let ends = events(&bench, &["--limit", "4"]);
    assert_eq!(
        names(&ends)[..2],
        ["daemon-stopping", "daemon-stopped"],
        "{ends:?}"
    );
    assert_eq!(names(&ends).last(), Some(&"daemon-started"));
}

#[test]
fn who_follows_sees_what_comes() {
    use std::io::{BufRead, BufReader};
    let bench = Bench::serving();
    let mut following = bench
        .command(&["events", "--follow", "--json", "--disk", "vm"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(following.stdout.take().unwrap()).lines();
    let origin = bench.origin("o.img", 1 << 20, 1);
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    let mut next = || {
        let line = lines.next().expect("it goes on").unwrap();
        let event: Value = serde_json::from_str(&line).unwrap();
        event["event"].as_str().unwrap().to_owned()
    };
    assert_eq!(next(), "disk-attached");
    assert_eq!(next(), "disk-added");
    following.kill().unwrap();
    following.wait().unwrap();
}

/// The second one serves all the same.
#[test]
fn two_daemons_do_not_write_one_file() {
    let one = Bench::serving();
    let mut two = Bench::with_pool();
    let state = one.path("state");
    two.start_with(&["--state-dir", &state]);
    assert!(
        two.log().contains("--state-dir of its own"),
        "{}",
        two.log()
    );
    assert_eq!(names(&events(&two, &[])), ["daemon-started"]);
    assert_eq!(events(&one, &[]).len(), 1);
}
