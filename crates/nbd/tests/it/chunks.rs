//! However bytes are cut on their way, the same comes out.

use crate::common::*;
use proptest::prelude::*;

fn style() -> impl Strategy<Value = Style> {
    prop_oneof![
        Just(Style::Simple),
        Just(Style::Structured),
        Just(Style::Extended)
    ]
}

fn request() -> impl Strategy<Value = Req> {
    let range = (0..SIZE, prop_oneof![1..64u64, Just(4096), 1..200_000u64]);
    (
        0..9u16,
        range,
        prop_oneof![4 => Just(0u16), 1 => any::<u16>()],
        any::<u8>(),
    )
        .prop_map(|(command, (offset, len), flags, fill)| match command {
            1 => Req::write(offset, vec![fill; len as usize]).flags(flags & 1),
            // Goodbye would end the script.
            2 => Req::new(3, 0, 0),
            // The flag that announces a payload has its own test.
            _ => Req::new(command, offset, len).flags(flags & !32),
        })
}

/// The replies, by cookie (their order may differ), and the disk afterwards, when `script` is
/// delivered in pieces of `steps` (cyclic) and replies are sent in pieces of `send_step`.
fn run(style: Style, script: &[Req], steps: &[usize], send_step: usize) -> (Vec<Reply>, Vec<u8>) {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    // No option may follow before the answer: deliver them one by one.
    let mut wire = Wire::new();
    wire.send_step = send_step;
    let mut turn = 0;
    let mut step = || {
        turn += 1;
        steps[turn % steps.len()]
    };
    match style {
        Style::Simple => {}
        Style::Structured => bytes.extend(option_bytes(8, &[])),
        Style::Extended => bytes.extend(option_bytes(11, &[])),
    }
    bytes.extend(option_bytes(
        10,
        &context_query("vm1", &["base:allocation"]),
    ));
    bytes.extend(option_bytes(7, &go("vm1", &[3])));
    for (i, req) in script.iter().enumerate() {
        bytes.extend(req.clone().cookie(i as u64).bytes(style));
    }
    assert_eq!(wire.feed_in(&bytes, &mut step), bytes.len());
    wire.settle();
    wire.take(18);
    while {
        assert_eq!(wire.u64(), 0x3e889045565a9);
        let (option, kind, len) = (wire.u32(), wire.u32(), wire.u32());
        wire.take(len as usize);
        (option, kind) != (7, 1)
    } {}
    let mut replies = Vec::new();
    while !wire.got.is_empty() {
        let cookie = wire
            .got
            .iter()
            .skip(8)
            .take(8)
            .fold(0, |n, b| n << 8 | usize::from(*b));
        let read_len = match script.get(cookie) {
            Some(req) if req.command == 0 => req.len,
            _ => 0,
        };
        replies.push(wire.reply(style, read_len as usize));
    }
    assert_eq!(replies.len(), script.len());
    replies.sort();
    let data = wire.disk.data.lock().unwrap().clone();
    (replies, data)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn cutting_changes_nothing(
        style in style(),
        script in prop::collection::vec(request(), 1..30),
        steps in prop::collection::vec(prop_oneof![1..40usize, 1..5000usize, 1..200_000usize], 1..10),
        send_step in prop_oneof![1..100usize, 1..100_000usize],
    ) {
        let (whole, data) = run(style, &script, &[usize::MAX], usize::MAX);
        let (pieces, data_too) = run(style, &script, &steps, send_step);
        prop_assert!(whole == pieces);
        prop_assert!(data == data_too);
    }
}

#[test]
fn every_single_cut_of_a_short_script() {
    for style in [Style::Simple, Style::Structured, Style::Extended] {
        let script = [
            Req::write(10, vec![7; 100]),
            Req::new(0, 0, 200),
            Req::new(7, 0, 4096),
            Req::write(u64::MAX, vec![1; 50]),
            Req::new(3, 0, 0),
            Req::write(4090, vec![8; 10]),
            Req::new(0, 4000, 200),
        ];
        let whole = run(style, &script, &[usize::MAX], usize::MAX);
        // Every byte alone, and every period up to the length of a request with its payload.
        for step in 1..140 {
            assert!(
                run(style, &script, &[step], step) == whole,
                "{style:?}, pieces of {step}"
            );
        }
    }
}
