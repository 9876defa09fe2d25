//! What the numbers were measured on.

use crate::args::Args;
use std::path::Path;
use std::process::Command;

/// Names and values for the header of a report.
pub fn describe(args: &Args) -> Vec<(String, String)> {
    let dir = args.dir.display().to_string();
    let source = output("df", &["--output=source,fstype", &dir])
        .lines()
        .last()
        .unwrap_or("")
        .trim()
        .to_owned();
    let rows = [
        ("date", output("date", &["-u", "+%Y-%m-%d %H:%M UTC"])),
        ("kernel", output("uname", &["-sr"])),
        ("cpu", cpu()),
        ("disk", format!("{source}, {}", disk_model(&source))),
        (
            "hearth",
            output(&args.hearth.display().to_string(), &["--version"]),
        ),
        ("fio", output("fio", &["--version"])),
        (
            "qemu-nbd",
            output("qemu-nbd", &["--version"])
                .lines()
                .next()
                .unwrap_or("")
                .to_owned(),
        ),
        ("nbdkit", output("nbdkit", &["--version"])),
        (
            "run",
            format!(
                "{} rounds of {} s, disks of {} MiB, address seeds 1 to {}",
                args.rounds,
                args.seconds,
                args.disk >> 20,
                args.rounds
            ),
        ),
    ];
    rows.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()
}

fn output(program: &str, args: &[&str]) -> String {
    match Command::new(program).args(args).output() {
        Ok(out) => String::from_utf8_lossy(&out.stdout).trim().to_owned(),
        Err(_) => "not installed".to_owned(),
    }
}

fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = |name: &str| {
        let line = info.lines().find(|l| l.starts_with(name)).unwrap_or("");
        line.split(": ").nth(1).unwrap_or("unknown").to_owned()
    };
    let threads = std::thread::available_parallelism().map_or(0, |n| n.get());
    format!(
        "{} (family {}, model {}), {threads} threads",
        value("model name"),
        value("cpu family"),
        value("model\t")
    )
}

fn disk_model(source: &str) -> String {
    let device = source.split_whitespace().next().unwrap_or("");
    let name = Path::new(device)
        .file_name()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default();
    let whole = output("lsblk", &["-no", "PKNAME", device]);
    let block = Path::new("/sys/block").join(if whole.is_empty() { &name } else { &whole });
    let read = |what: &str| {
        std::fs::read_to_string(block.join(what))
            .map(|s| s.trim().to_owned())
            .unwrap_or_default()
    };
    let model = read("device/model");
    let cache = read("queue/write_cache");
    let model = if model.is_empty() {
        "model not told (virtual disk)".to_owned()
    } else {
        model
    };
    format!("{model}, write cache: {cache}")
}
