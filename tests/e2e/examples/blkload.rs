use hearth_e2e::blk::*;
use std::time::Duration;
fn main() -> anyhow::Result<()> {
    let a: Vec<String> = std::env::args().collect();
    let (kind, depth, secs) = (&a[3], a[4].parse::<usize>()?, a[5].parse()?);
    let span = a
        .get(6)
        .map_or(u64::MAX, |s| s.parse::<u64>().unwrap() << 20);
    let block = a.get(7).map_or(4096usize, |s| s.parse().unwrap());
    let p = std::path::Path::new(&a[2]);
    let mut d = if a[1] == "file" {
        Disk::file(p, (block * depth).max(1 << 20))?
    } else {
        Disk::vhost(p, (block * depth).max(1 << 20))?
    };
    let kind = match kind.as_str() {
        "read" => Kind::Read,
        "write" => Kind::Write,
        _ => Kind::Mixed,
    };
    let cpu = a.get(8).map(|pid| cpu_of(pid));
    let m = d.run(&Load {
        kind,
        depth,
        block,
        span,
        time: Duration::from_secs(secs),
        seed: 7,
    })?;
    print!("{m:?}");
    if let (Some(c), Some(pid)) = (cpu, a.get(8)) {
        print!(
            " server_us {:.2}",
            (cpu_of(pid) - c) * 1e4 / m.requests as f64
        );
    }
    println!();
    Ok(())
}
fn cpu_of(pid: &str) -> f64 {
    let s = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let f: Vec<&str> = s.rsplit(')').next().unwrap().split_whitespace().collect();
    f[11].parse::<f64>().unwrap() + f[12].parse::<f64>().unwrap()
}
