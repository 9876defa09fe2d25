//! The miss-ratio curve against exact stack distances, on real traces if there are some.

use std::path::PathBuf;

use hearth_policy::mrc::{self, Mrc};
use hearth_trace::{Options, Reader};

/// Longest trace taken: the exact curve needs memory for every access.
const ACCESSES_MAX: usize = 5_000_000;

#[test]
fn curves_are_within_two_points_on_real_traces() {
    let Some(dir) = std::env::var_os("HEARTH_TRACES") else {
        return;
    };
    let dirs = [PathBuf::from(&dir), PathBuf::from(&dir).join("keys")];
    let mut files: Vec<PathBuf> = dirs
        .iter()
        .filter_map(|d| std::fs::read_dir(d).ok())
        .flat_map(|d| d.flatten().map(|e| e.path()))
        .filter(|p| p.to_string_lossy().ends_with(".csv.zst"))
        .collect();
    files.sort();
    let mut worst = (0.0, PathBuf::new());
    for path in files {
        let mut keys = Vec::new();
        for r in Reader::open(&path, Options::default()).expect("recognised") {
            let (start, end) = r.expect("a record").blocks();
            keys.extend(start..end);
        }
        if keys.len() > ACCESSES_MAX {
            continue;
        }
        let mut mrc = Mrc::new();
        for key in &keys {
            mrc.access(*key);
        }
        let most = mrc.blocks();
        let sizes: Vec<f64> = (1..=50)
            .map(|i| (most * f64::from(i) / 50.0).floor())
            .collect();
        let exact = mrc::exact(keys.iter().copied(), &sizes);
        let curve = mrc.curve(&sizes);
        let errors: Vec<f64> = curve
            .iter()
            .zip(&exact)
            .map(|(a, b)| (a.1 - b.1).abs())
            .collect();
        let max = errors.iter().copied().fold(0.0, f64::max);
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        println!(
            "{:40} rate {:.4} mean error {:.4} max {:.4}",
            path.file_name().unwrap_or_default().to_string_lossy(),
            mrc.rate(),
            mean,
            max
        );
        assert!(mean < 0.02, "{}: {mean}", path.display());
        if max > worst.0 {
            worst = (max, path);
        }
    }
    println!("worst point {:.4} on {}", worst.0, worst.1.display());
}
