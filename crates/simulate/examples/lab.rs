use hearth_simulate::*;
use hearth_simulate::proto::*;
use hearth_trace::*;
fn main() {
    let dir = std::path::PathBuf::from(std::env::args().nth(1).unwrap());
    let only = std::env::args().nth(2).unwrap_or_default();
    let mut files: Vec<_> = ["", "keys"].iter().flat_map(|s| std::fs::read_dir(dir.join(s)).unwrap()).map(|f| f.unwrap().path()).filter(|p| p.to_string_lossy().ends_with(".csv.zst")).collect();
    files.sort();
    let base = std::fs::read_to_string(dir.join("baselines.csv")).unwrap();
    let d = P { w: 0.2, gate: true, promote: 1, pre: 0, tune: true, skip: 0 };
    let which = std::env::var("WHICH").unwrap_or("t,th0,th1,th2,th3,th4".into());
    let ps: Vec<(&str, P)> = vec![
        ("t", P { ..d }),
        ("th0", P { pre: 2, skip: 0, ..d }),
        ("th1", P { pre: 2, skip: 1, ..d }),
        ("th2", P { pre: 2, skip: 2, ..d }),
        ("th3", P { pre: 2, skip: 3, ..d }),
        ("th4", P { pre: 2, skip: 4, ..d }),
        ("th9", P { pre: 2, skip: 9, ..d }),
        ("ts0", P { pre: 1, skip: 0, ..d }),
        ("ts3", P { pre: 1, skip: 3, ..d }),
    ].into_iter().filter(|x| which.split(',').any(|w| w == x.0)).collect();
    let mut ok5 = vec![0; ps.len()]; let mut below = vec![0; ps.len()];
    let mut sum = vec![0.0; ps.len()]; let mut fw = vec![0.0; ps.len()];
    let (mut best_sum, mut bestp_sum, mut ref_sum, mut n) = (0.0, 0.0, 0.0, 0);
    print!("{:28} {:>3} {:>6} {:>6} {:>6}|", "", "", "lru", "best", "opt");
    for (name, _) in &ps { print!(" {name:>6}"); }
    println!();
    for f in files {
        let name = f.file_name().unwrap().to_string_lossy().replace(".csv.zst", "");
        if !name.contains(&only) || only.is_empty() && std::env::var("SKIP").unwrap_or("wsrch,hadoop,P6,cod_pre".into()).split(',').any(|x| name.contains(x)) { continue; }
        let w = Workload::load(&name, Reader::open(&f, Options::default()).unwrap()).unwrap();
        for pct in [1, 5, 10, 20, 40] {
            let (mut lru, mut best, mut opt, mut lruw) = (0.0, 0.0f64, 0.0, 1.0);
            for l in base.lines().filter(|l| l.starts_with(&format!("{name},{pct},"))) {
                let c: Vec<&str> = l.split(',').collect();
                let rh: f64 = c[6].parse().unwrap_or(0.0); let reads: u64 = c[4].parse().unwrap_or(0); let hr: f64 = c[7].parse().unwrap();
                let s = 100.0 * if reads > 0 && !c[6].is_empty() { rh } else { hr };
                match c[3] { "OPT" => opt = s, "OPT-bypass" => {}, "LRU" => { lru = s; best = best.max(s); lruw = c[10].parse().unwrap() } _ => best = best.max(s) }
            }
            if best < 0.5 { continue; }
            print!("{name:28} {pct:3} {lru:6.2} {best:6.2} {opt:6.2}|");
            let mut b = 0.0f64; let mut bp = 0.0f64;
            for (i, (_, p)) in ps.iter().enumerate() {
                let o = run_proto(&w, w.capacity(pct as f64 / 100.0), *p);
                let s = o.score() * 100.0; sum[i] += s; if p.pre > 0 { bp = bp.max(s) } else { b = b.max(s) }
                fw[i] += o.flash_writes() as f64 / lruw;
                print!(" {s:6.2}{}", if s < lru - 1.0 { "!" } else if s < best * 0.95 { "-" } else { " " }); ok5[i] += u32::from(s >= best * 0.95); below[i] += u32::from(s < lru - 1.0);
            }
            println!(" max {b:6.2} {:+.2}  pmax {bp:6.2}", b - best);
            n += 1; best_sum += best; ref_sum += b; bestp_sum += bp;
        }
    }
    let n = n as f64;
    println!("\ncells {n} best {:.3} max {:.3} maxp {:.3}", best_sum / n, ref_sum / n, bestp_sum / n);
    for (i, (name, _)) in ps.iter().enumerate() { println!("{name}: {:.3} fw {:.3} within5 {:.1}% belowlru {}", sum[i] / n, fw[i] / n, 100.0 * ok5[i] as f64 / n, below[i]); }
}
