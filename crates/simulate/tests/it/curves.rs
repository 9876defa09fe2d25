//! The miss-ratio curve against exact stack distances, on real traces if there are some.

use std::path::PathBuf;

use hearth_policy::mrc::{self, Mrc};
use hearth_trace::{Options, Reader};

/// Longest trace taken: the exact curve needs memory for every access, 24 bytes.
const ACCESSES_MAX: usize = 20_000_000;
/// Hit ratio by which a point may be wrong.
const ERROR_MAX: f64 = 0.02;
/// Points of a curve that may be wrong by more, as a divisor of all: where the curve is steep.
const OUTSIDE_PART: usize = 10;
/// They must be within [`ERROR_MAX`] of what is right for a size that differs by this part: the standard
/// deviation of a size told by 12,288 samples is 1 / √12,288 of it.
const SIZE_ERROR: f64 = 0.01;
/// No single point may be wrong by more.
const WORST_MAX: f64 = 0.035;
/// Points of each curve that are looked at.
const POINTS: u32 = 50;

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
        let sizes: Vec<f64> = (1..=POINTS)
            .map(|i| (most * f64::from(i) / f64::from(POINTS)).floor())
            .collect();
        let curve = mrc.curve(&sizes);
        let exact = |scale: f64| {
            let sizes: Vec<f64> = sizes.iter().map(|s| s * scale).collect();
            mrc::exact(keys.iter().copied(), &sizes)
        };
        let middle = exact(1.0);
        let errors: Vec<f64> = curve
            .iter()
            .zip(&middle)
            .map(|(a, b)| (a.1 - b.1).abs())
            .collect();
        let max = errors.iter().copied().fold(0.0, f64::max);
        let mean = errors.iter().sum::<f64>() / errors.len() as f64;
        let outside = errors.iter().filter(|e| **e > ERROR_MAX).count();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        println!(
            "{name:40} rate {:.4} mean error {mean:.4} max {max:.4} outside {outside}",
            mrc.rate(),
        );
        assert!(mean < 0.005, "{name}: {mean}");
        assert!(max < WORST_MAX, "{name}: {max}");
        assert!(outside * OUTSIDE_PART <= errors.len(), "{name}: {outside}");
        if mrc.rate() == 1.0 {
            assert!(
                max < 1e-9,
                "{name}: all blocks are in the sample, yet {max}"
            );
        }
        if outside > 0 {
            let (low, high) = (exact(1.0 - SIZE_ERROR), exact(1.0 + SIZE_ERROR));
            for (((got, low), high), want) in curve.iter().zip(&low).zip(&high).zip(&middle) {
                if (got.1 - want.1).abs() > ERROR_MAX {
                    println!(
                        "  at {:.0}: {:.4}, exact {:.4} ({:.4} to {:.4})",
                        got.0, got.1, want.1, low.1, high.1
                    );
                }
                assert!(
                    got.1 >= low.1 - ERROR_MAX && got.1 <= high.1 + ERROR_MAX,
                    "{name}: {got:?}"
                );
            }
        }
        if max > worst.0 {
            worst = (max, path);
        }
    }
    println!("worst point {:.4} on {}", worst.0, worst.1.display());
}
