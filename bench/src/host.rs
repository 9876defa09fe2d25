//! What the numbers were measured on.

use crate::args::Args;
use std::path::Path;
use std::process::Command;

/// Names and values for the header of a report of rows.
pub fn describe(args: &Args) -> Vec<(String, String)> {
    let mut rows = machine(&args.hearth);
    rows.push(("disk", disk(&args.dir)));
    rows.push((
        "run",
        format!(
            "{} rounds of {} s, disks of {} MiB, address seeds 1 to {}",
            args.rounds,
            args.seconds,
            args.disk >> 20,
            args.rounds
        ),
    ));
    rows.into_iter().map(|(k, v)| (k.to_owned(), v)).collect()
}

/// The machine and the programs.
pub fn machine(hearth: &Path) -> Vec<(&'static str, String)> {
    let first = |text: String| text.lines().next().unwrap_or("").to_owned();
    let version = output(&hearth.display().to_string(), &["--version"]);
    vec![
        ("date", output("date", &["-u", "+%Y-%m-%d %H:%M UTC"])),
        ("kernel", output("uname", &["-sr"])),
        ("cpu", cpu()),
        (
            "hearth",
            format!("{version}, commit {}", env!("HEARTH_COMMIT")),
        ),
        ("fio", output("fio", &["--version"])),
        ("libblkio", format!("crate blkio {}", env!("BLKIO_VERSION"))),
        ("qemu", first(output("qemu-system-x86_64", &["--version"]))),
        ("qemu-nbd", first(output("qemu-nbd", &["--version"]))),
        ("nbdkit", output("nbdkit", &["--version"])),
    ]
}

/// The disk below a directory: device, file system, model.
pub fn disk(dir: &Path) -> String {
    let dir = dir.display().to_string();
    let source = output("df", &["--output=source,fstype", &dir]);
    let source = source.lines().last().unwrap_or("");
    let words: Vec<&str> = source.split_whitespace().collect();
    format!("{}, {}", words.join(" "), disk_model(source))
}

fn output(program: &str, args: &[&str]) -> String {
    match Command::new(program).args(args).output() {
        Ok(out) => String::from_utf8_lossy(&out.stdout).trim().to_owned(),
        Err(_) => "not installed".to_owned(),
    }
}

/// Threads of the processors this program may use.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Threads that wanted to run in the last minute, on average (Linux counts those that wait for a
/// disk, too).
pub fn load() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/loadavg").ok()?;
    text.split(' ').next()?.parse().ok()
}

fn cpu() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let value = |name: &str| {
        let line = info.lines().find(|l| l.starts_with(name)).unwrap_or("");
        line.split(": ").nth(1).unwrap_or("unknown").to_owned()
    };
    let threads = threads();
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
