use hearth_policy::reference::Kind;
use hearth_simulate::*;
use hearth_trace::*;
fn main() {
    let dir = std::path::PathBuf::from(std::env::args().nth(1).unwrap());
    let only = std::env::args().nth(2).unwrap_or_default();
    let mut files: Vec<_> = ["", "keys"].iter().flat_map(|s| std::fs::read_dir(dir.join(s)).unwrap()).map(|f| f.unwrap().path()).filter(|p| p.to_string_lossy().ends_with(".csv.zst")).collect();
    files.sort();
    let base = std::fs::read_to_string(dir.join("baselines.csv")).unwrap();
    for f in files {
        let name = f.file_name().unwrap().to_string_lossy().replace(".csv.zst", "");
        if !name.contains(&only) { continue; }
        let t = std::time::Instant::now();
        let w = Workload::load(&name, Reader::open(&f, Options::default()).unwrap()).unwrap();
        println!("{name} {} {} {:?}", w.accesses(), w.unique, t.elapsed());
        for pct in [1, 5, 10, 20, 40] {
            for k in Kind::ALL {
                let tag = match k { Kind::Lru => "LRU", Kind::TwoQ => "2Q", Kind::Arc => "ARC", Kind::Lirs => "LIRS", Kind::TinyLfu => "W-TinyLFU", Kind::S3Fifo => "S3-FIFO", Kind::Sieve => "SIEVE", Kind::Opt => "OPT" };
                let line = base.lines().find(|l| l.starts_with(&format!("{name},{pct},")) && l.split(',').nth(3) == Some(tag)).unwrap();
                let c: Vec<&str> = line.split(',').collect();
                let t = std::time::Instant::now();
                let o = run(Policy::Reference(k), &w, w.capacity(pct as f64 / 100.0));
                let want: f64 = c[7].parse().unwrap();
                let d = (o.hit_ratio() - want) * 100.0;
                if d.abs() > 0.02 { println!("{name} {pct} {tag}: {:.4} want {:.4} diff {:+.3} [{:?}]", o.hit_ratio(), want, d, t.elapsed()); }
            }
        }
    }
}
