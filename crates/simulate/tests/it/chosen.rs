//! Choosing rules must not cost more than it brings: on workloads whose nature changes, the rules chosen in
//! miniature are held against each of them kept throughout.

use hearth_policy::EXPERTS;
use hearth_simulate::{Policy, Settings, made, run};

/// How far below the best of the rules kept throughout the chosen ones may be, in hits of all reads.
const MARGIN: f64 = 0.01;

fn hits(load: &hearth_simulate::Workload, blocks: usize, settings: &Settings) -> f64 {
    run(Policy::HearthDemand, load, blocks, settings).0.score()
}

#[test]
fn where_phases_change_the_choice_is_hardly_worse_than_the_best_rules_kept() {
    for seed in 0..3 {
        let load = made::Kind::Phases.make(seed, 120_000);
        for share in [0.05, 0.10, 0.20, 0.40] {
            let blocks = load.capacity(share);
            let settings = |rules| Settings {
                rules,
                dead_space: false,
                ..Settings::default()
            };
            let chosen = hits(&load, blocks, &settings(None));
            let kept = EXPERTS.map(|rules| hits(&load, blocks, &settings(Some(rules))));
            let best = kept.into_iter().fold(0.0, f64::max);
            assert!(
                chosen >= best - MARGIN,
                "seed {seed}, {blocks} blocks: {chosen:.3}, kept {kept:.3?}"
            );
        }
    }
}

#[test]
fn where_the_lead_swings_the_choice_calms_down() {
    for seed in 0..3 {
        // Forwards and backwards over more than fits: in turn each of the rules is far ahead.
        let load = made::Kind::Zigzag.make(seed, 200_000);
        for (share, least) in [(0.20, 0.5), (0.40, 0.7)] {
            let blocks = load.capacity(share);
            let settings = |rules| Settings {
                rules,
                dead_space: false,
                ..Settings::default()
            };
            let chosen = hits(&load, blocks, &settings(None));
            let kept = EXPERTS.map(|rules| hits(&load, blocks, &settings(Some(rules))));
            let best = kept.into_iter().fold(0.0, f64::max);
            assert!(
                chosen >= best * least,
                "seed {seed}, {blocks} blocks: {chosen:.3}, kept {kept:.3?}"
            );
        }
    }
}
