//! What the daemon knows of a live disk's workload: histograms and recordings.

use std::path::Path;

use crate::common::{Bench, until};

const MIB: usize = 1 << 20;

fn served() -> Bench {
    let bench = Bench::serving();
    let origin = bench.origin("o.img", 8 * MIB, 1);
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    bench
}

#[test]
fn histograms_count_what_the_guest_sent() {
    let bench = served();
    assert!(
        bench
            .ok(&["histogram", "vm"])
            .contains("nothing has been asked")
    );
    let mut client = bench.connect("vm").unwrap();
    for i in 0..10 {
        client.read(i * 8192, 8192);
    }
    client.write(MIB as u64, &[1; 4096]);
    client.flush();

    let text = bench.ok(&["histogram", "vm"]);
    assert!(text.contains("11 reads and writes"), "{text}");
    assert!(text.contains("to 8 KiB"), "{text}");
    let json = bench.json(&["histogram", "vm"]);
    let histogram = |title: &str| {
        let all = json["histograms"].as_array().unwrap();
        all.iter().find(|h| h["title"] == title).unwrap().clone()
    };
    let reads = histogram("IO lengths of Read commands");
    assert_eq!(
        (&reads["count"], &reads["mean"]),
        (&10.into(), &8192.into())
    );
    let distance = histogram("distance (in LBNs) between successive Read commands");
    assert_eq!((&distance["min"], &distance["max"]), (&1.into(), &1.into()));
    assert_eq!(
        histogram("latency of Write IOs in Microseconds (us)")["count"],
        1
    );
    assert_eq!(json["read_latency"]["count"], 10);

    let csv = bench.ok(&["histogram", "vm", "--csv", "--reset"]);
    assert_eq!(csv.matches("Histogram: ").count(), 16);
    assert!(
        csv.contains("virtual disk handleID,1 (vm)\nmin,4096\nmax,8192\n"),
        "{csv}"
    );
    assert_eq!(
        bench.json(&["histogram", "vm"])["histograms"][0]["count"],
        0
    );
    assert!(
        bench
            .refused(&["histogram", "nobody"])
            .contains("no disk named")
    );
}

#[test]
fn a_recording_is_what_was_asked() {
    let bench = served();
    let file = bench.path("a.trace");
    assert!(
        bench
            .refused(&["trace", "record", "vm", "--stop"])
            .contains("not being recorded")
    );
    let idle = bench.run(&["trace", "record", "vm", "--stop", "--json"]);
    let idle: serde_json::Value = serde_json::from_slice(&idle.stderr).unwrap();
    assert!(
        idle["remedy"].as_str().unwrap().contains("--out FILE"),
        "{idle}"
    );
    bench.ok(&["trace", "record", "vm", "--out", &file]);
    assert!(
        bench
            .refused(&["trace", "record", "vm", "--out", &bench.path("b")])
            .contains("`hearth trace record DISK --stop`")
    );
    let mut client = bench.connect("vm").unwrap();
    for i in 0..100 {
        client.read(i * 4096, 4096);
    }
    client.write(0, &[1; 8192]);
    client.flush();
    assert!(bench.ok(&["disk", "show", "vm"]).contains("recording"));
    let ended = bench.json(&["trace", "record", "vm", "--stop"]);
    assert_eq!(
        (&ended["records"], &ended["dropped"]),
        (&102.into(), &0.into())
    );
    let sum = bench.json(&["trace", "info", &file]);
    assert_eq!(
        (&sum["reads"], &sum["writes"], &sum["flushes"]),
        (&100.into(), &1.into(), &1.into())
    );
    assert!(
        bench
            .refused(&["trace", "record", "vm", "--out", &file])
            .contains("not there yet")
    );
    // By itself, after a while; the command waits for it.
    let short = bench.json(&[
        "trace",
        "record",
        "vm",
        "--out",
        &bench.path("c"),
        "--for",
        "0.2s",
    ]);
    assert_eq!(short["active"], false);
}

#[test]
fn a_recording_survives_kill_9() {
    let mut bench = served();
    let file = bench.path("a.trace");
    bench.ok(&["trace", "record", "vm", "--out", &file]);
    let mut client = bench.connect("vm").unwrap();
    for i in 0..500 {
        client.read((i % 100) * 4096, 4096);
    }
    // All of it is on its way to the file within a moment; what is there when the kill comes counts.
    until("records are written", || {
        (bench.disk("vm")["recording"]["records"].as_u64()? >= 500).then_some(())
    });
    client.read(0, 4096);
    bench.kill();
    let sum = bench.json(&["trace", "info", &file]);
    assert!(sum["requests"].as_u64().unwrap() >= 500, "{sum}");
    bench.start();
    assert!(bench.disk("vm")["recording"].is_null());
}

#[test]
fn advice_finds_the_hot_part_and_is_applied() {
    let bench = Bench::serving();
    let origin = bench.origin("o.img", 8 * MIB, 1);
    let small = bench.origin("small.img", 4 * MIB, 2);
    // Slower than any flash, so that misses cost more than hits wherever this runs.
    let origin = format!("model-latency=1ms:{origin}");
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    bench.ok(&["disk", "add", "idle", "--origin", &small]);
    assert!(bench.ok(&["advise"]).contains("there is advice from"));
    let mut client = bench.connect("vm").unwrap();
    // Two MiB over and over, the rest once.
    for round in 0..8u64 {
        for block in 0..512u64 {
            client.read(block * 4096, 4096);
        }
        for block in 0..180u64 {
            client.read((512 + round * 180 + block) * 4096, 4096);
        }
    }
    let report = bench.json(&["advise", "vm"]);
    let advice = &report["disks"][0];
    let bytes = |value: &serde_json::Value| value.as_u64().unwrap();
    let advised = bytes(&advice["advised"]["bytes"]);
    assert!((2 << 20..4 << 20).contains(&advised), "{advice:#}");
    assert!(
        advice["advised"]["hit_ratio"].as_f64().unwrap() > 0.6,
        "{advice:#}"
    );
    assert!(advice["advised"]["latency_us"].as_f64() <= advice["miss_us"].as_f64());
    assert_eq!(advice["own_rules"], true, "{advice:#}");
    assert_eq!(advice["block_size"]["advised"], 4096);
    assert_eq!(advice["mode"]["advised"], "write-through");
    assert_eq!(bytes(&advice["working_set"]), (512 + 8 * 180) * 4096);
    let text = bench.ok(&["advise", "vm", "--svg", &bench.path("c.svg")]);
    assert!(
        text.contains("Cache mode should be write-through") && text.contains("AS LRU"),
        "{text}"
    );
    assert!(
        std::fs::read_to_string(bench.path("c.svg"))
            .unwrap()
            .contains("polyline")
    );

    let applied = bench.json(&["advise", "--apply"]);
    assert_eq!(
        applied["applied"].as_array().unwrap().len(),
        1,
        "{applied:#}"
    );
    let kept = bytes(&applied["applied"][0]["kept"]);
    assert!(kept > 0 && kept <= bytes(&advice["share"]["bytes"]));
    assert_eq!(bytes(&bench.disk("vm")["share"]), kept);
    // Following the advice stays within what the owner allows, and ends when told.
    bench.ok(&["disk", "set", "vm", "--auto", "on", "--max", "1M"]);
    let vm = bench.disk("vm");
    assert_eq!((&vm["auto"], bytes(&vm["share"])), (&true.into(), 3 << 18));
    bench.ok(&["advise", "vm", "--auto", "off"]);
    assert!(bench.disk("vm")["share"].is_null());
    assert!(
        bench
            .refused(&["advise", "nobody"])
            .contains("no disk named")
    );
}

#[test]
fn advice_outlives_stops_and_kills() {
    let mut bench = Bench::serving();
    let origin = bench.origin("o.img", 8 * MIB, 1);
    bench.ok(&["disk", "add", "vm", "--origin", &origin]);
    let mut client = bench.connect("vm").unwrap();
    for i in 0..6000u64 {
        client.read(i * i % 1000 * 4096, 4096);
    }
    drop(client);
    let advice = |bench: &Bench| {
        let report = bench.json(&["advise", "vm"]);
        let advice = report["disks"][0].clone();
        assert!(advice["reason"].is_null(), "{advice:#}");
        advice
    };
    let before = advice(&bench);
    let same = |bench: &Bench| {
        let after = advice(bench);
        // What rests on how fast the origin answers is measured anew.
        for what in ["working_set", "own_rules"] {
            assert_eq!(after[what], before[what], "{what}: {after:#}");
        }
        let points = |of: &serde_json::Value| of["curve"].as_array().unwrap().clone();
        let (then, now) = (points(&before), points(&after));
        assert!(then.len() > 10 && then.len() == now.len(), "{after:#}");
        for (then, now) in then.iter().zip(&now) {
            assert_eq!(then["bytes"], now["bytes"]);
            let ratio = |of: &serde_json::Value| of["hit_ratio"].as_f64().unwrap();
            assert!((ratio(then) - ratio(now)).abs() < 0.01, "{then} {now}");
        }
    };
    bench.stop();
    bench.start();
    same(&bench);
    // What was kept last counts.
    bench.kill();
    bench.start();
    same(&bench);
    // Nothing new: it stays as it is.
    bench.stop();
    let kept: Vec<_> = std::fs::read_dir(bench.dir.path().join("state/curves"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    assert_eq!(kept.len(), 1, "{kept:?}");
    let mut bytes = std::fs::read(&kept[0]).unwrap();
    bytes[100] ^= 1;
    std::fs::write(&kept[0], bytes).unwrap();
    bench.start();
    let report = bench.json(&["advise", "vm"]);
    assert!(!report["disks"][0]["reason"].is_null(), "{report:#}");
    let said = bench.log();
    let lines = said.lines().filter(|l| l.contains("measured anew"));
    assert_eq!(lines.count(), 1, "{said}");
    bench.ok(&["disk", "remove", "vm"]);
    assert!(!kept[0].exists());
}

#[test]
fn a_recording_is_replayed_and_verified() {
    let bench = served();
    let file = bench.path("a.trace");
    bench.ok(&["trace", "record", "vm", "--out", &file]);
    let mut client = bench.connect("vm").unwrap();
    for i in 0..200u64 {
        client.write((i * 37 % 300) * 4096, &[1; 8192]);
        client.read((i * 53 % 300) * 4096, 4096);
    }
    client.flush();
    bench.ok(&["trace", "record", "vm", "--stop"]);
    drop(client);

    let scratch = bench.origin("scratch.img", 4 * MIB, 3);
    bench.ok(&["disk", "add", "scratch", "--origin", &scratch]);
    let socket = bench.run_dir().join("nbd.sock");
    let uri = format!("nbd+unix:///scratch?socket={}", socket.display());
    let refused = bench.refused(&["trace", "replay", &file, "--to", &uri]);
    assert!(refused.contains("--overwrite"), "{refused}");
    let replay = |more: &[&str]| {
        let mut words = vec!["trace", "replay", file.as_str()];
        words.extend(more);
        bench.json(&words)
    };
    let out = replay(&["--to", &uri, "--overwrite", "--verify", "--flat-out"]);
    assert_eq!(
        (&out["requests"], &out["errors"]),
        (&401.into(), &0.into()),
        "{out:#}"
    );
    assert_eq!(out["writes"]["count"], 200);
    assert!(
        out["verified"]["sectors"].as_u64().unwrap() > 1000,
        "{out:#}"
    );
    assert_eq!(out["verified"]["wrong"], 0);
    assert!(
        out["cache"]["read_hit_ratio"].as_f64().unwrap() > 0.5,
        "{out:#}"
    );
    let text = bench.ok(&["trace", "replay", &file, "--to", &uri, "--reads-only"]);
    assert!(text.contains("read latency"), "{text}");
    assert!(text.contains("201 writes, discards and flushes"), "{text}");

    let plain = bench.origin("plain.img", MIB, 4);
    let beyond = bench.refused(&["trace", "replay", &file, "--to", &plain, "--overwrite"]);
    assert!(beyond.contains("--wrap"), "{beyond}");
    let out = replay(&[
        "--to",
        &plain,
        "--overwrite",
        "--wrap",
        "--verify",
        "--depth",
        "4",
    ]);
    assert_eq!(
        (&out["errors"], &out["verified"]["wrong"]),
        (&0.into(), &0.into()),
        "{out:#}"
    );
}

#[test]
fn a_trace_without_its_end_is_not_passed_off_as_whole() {
    let bench = Bench::new();
    let csv = bench.path("whole.csv");
    let lines: String = (0..5000)
        .map(|i| format!("{i},R,{},4096\n", i * 4096))
        .collect();
    std::fs::write(
        &csv,
        format!("time_us,op,offset_bytes,length_bytes\n{lines}"),
    )
    .unwrap();
    let file = bench.path("a.trace");
    bench.ok(&["trace", "convert", &csv, &file]);
    let whole = bench.json(&["trace", "info", &file]);
    assert_eq!(
        (&whole["torn"], &whole["requests"]),
        (&false.into(), &5000.into())
    );
    let bytes = std::fs::read(&file).unwrap();
    std::fs::write(&file, &bytes[..bytes.len() - 3]).unwrap();
    // The second frame is the one cut off.
    let info = bench.json(&["trace", "info", &file]);
    assert_eq!(
        (&info["torn"], &info["torn_at"], &info["requests"]),
        (&true.into(), &4096.into(), &4096.into())
    );
    assert!(bench.ok(&["trace", "info", &file]).contains("record 4096"));
    let target = bench.origin("t.img", 20 * MIB, 1);
    let replay = ["trace", "replay", &file, "--to", &target, "--flat-out"];
    assert!(bench.ok(&replay).contains("record 4096"));
    assert_eq!(bench.json(&replay)["torn_at"], 4096);
    let simulated = bench.run(&["simulate", &file, "--size", "1M", "--policy", "lru"]);
    let noted = String::from_utf8_lossy(&simulated.stderr);
    assert!(noted.contains("record 4096"), "{noted}");
}

#[test]
fn traces_that_are_none_are_named() {
    let bench = Bench::new();
    let good = bench.path("good.csv");
    std::fs::write(&good, "0,R,0,4096\n1,R,4096,4096\n").unwrap();
    let bad = bench.path("bad.csv");
    std::fs::write(&bad, "0,R,0,4096\n1,R,x,4096\n").unwrap();
    let noise = bench.path("noise");
    std::fs::write(&noise, "hello\n").unwrap();
    for (trace, remedy) in [(&bad, "--format csv right"), (&noise, "--format (hearth")] {
        for command in [
            &["simulate", &good, trace][..],
            &["trace", "info", trace],
            &["trace", "replay", trace, "--to", "/nowhere"],
        ] {
            let mut command = command.to_vec();
            assert!(bench.refused(&command).contains(trace));
            // For programs, what to do stands apart from what is wrong.
            command.push("--json");
            let out = bench.run(&command);
            let said: serde_json::Value = serde_json::from_slice(&out.stderr).unwrap();
            assert!(said["error"].as_str().unwrap().contains(trace), "{said}");
            assert!(said["remedy"].as_str().unwrap().contains(remedy), "{said}");
        }
    }
}

#[test]
fn a_trace_is_written_as_its_name_says_and_in_every_form() {
    let bench = Bench::new();
    let source = bench.path("a.csv");
    std::fs::write(
        &source,
        "time_us,op,offset_bytes,length_bytes\n0,R,0,4096\n5,W,700,4096\n9,F,0,0\n",
    )
    .unwrap();
    let trace = bench.path("a.trace");
    bench.ok(&["trace", "convert", &source, &trace]);
    let back = bench.path("b.csv");
    bench.ok(&["trace", "convert", &trace, &back]);
    assert_eq!(
        std::fs::read(&back).unwrap(),
        std::fs::read(&source).unwrap()
    );
    let packed = bench.refused(&["trace", "convert", &trace, &bench.path("b.csv.gz")]);
    assert!(packed.contains("compressed"), "{packed}");
    for form in [
        "msr",
        "alibaba",
        "spc",
        "blkparse",
        "vscsi1",
        "vscsi2",
        "oracle-general",
    ] {
        let out = bench.path(form);
        let done = bench.json(&["trace", "convert", &trace, &out, "--to", form]);
        assert_eq!(done["form"], form);
        let flushes = u64::from(form.starts_with("vscsi"));
        assert_eq!(done["left_out"], 1 - flushes, "{done}");
        let info = bench.ok(&["trace", "info", &out]);
        assert!(info.contains(&format!("form          {form}")), "{info}");
    }
    let said = bench.ok(&["trace", "convert", &trace, &bench.path("s"), "--to", "spc"]);
    assert!(
        said.contains("2 records") && said.contains("left out") && said.contains("widened"),
        "{said}"
    );
}

#[test]
fn a_conversion_that_fails_leaves_nothing_behind() {
    let bench = Bench::new();
    let source = bench.path("a.csv");
    let head = "time_us,op,offset_bytes,length_bytes\n0,R,0,4096\n";
    std::fs::write(&source, format!("{head}x,R,0,4096\n")).unwrap();
    let out = bench.path("a.trace");
    let said = bench.refused(&["trace", "convert", &source, &out]);
    assert!(said.contains("record 2"), "{said}");
    assert!(!Path::new(&out).exists() && !Path::new(&format!("{out}.part")).exists());
    std::fs::write(&source, head).unwrap();
    bench.ok(&["trace", "convert", &source, &out]);
    let again = bench.refused(&["trace", "convert", &source, &out]);
    assert!(again.contains("not there yet"), "{again}");
}

#[test]
fn a_bench_that_cannot_be_says_apart_what_to_do() {
    let bench = Bench::new();
    let dir = bench.path("");
    let out = bench.run(&[
        "bench", "--table", "storm", "--flash", &dir, "--out", &dir, "--json",
    ]);
    let said: serde_json::Value = serde_json::from_slice(&out.stderr).unwrap();
    assert!(
        said["remedy"].as_str().unwrap().contains("--guest"),
        "{said}"
    );
}

#[test]
fn a_trace_on_standard_input_is_replayed() {
    use std::io::Write;
    use std::process::{Command, Stdio};

    let bench = Bench::new();
    let target = bench.path("t.raw");
    std::fs::File::create(&target)
        .and_then(|f| f.set_len(MIB as u64))
        .unwrap();
    let mut replay = Command::new(env!("CARGO_BIN_EXE_hearth"))
        .args(["trace", "replay", "-", "--flat-out", "--json", "--to"])
        .arg(&target)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let trace = "time_us,op,offset_bytes,length_bytes\n0,R,0,4096\n5,R,8192,4096\n";
    let mut stdin = replay.stdin.take().unwrap();
    stdin.write_all(trace.as_bytes()).unwrap();
    drop(stdin);
    let said = replay.wait_with_output().unwrap();
    let said: serde_json::Value = serde_json::from_slice(&said.stdout).unwrap();
    assert_eq!(said["requests"], 2, "{said}");
    let image = bench.path("t.csv");
    std::fs::write(&image, trace).unwrap();
    let refused = bench.refused(&["trace", "replay", &image, "--to", "qcow2:/x"]);
    assert!(refused.contains("give nbd+unix://"), "{refused}");
}
