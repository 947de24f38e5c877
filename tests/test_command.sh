#!/bin/sh
# test_command.sh: the moe_route command: help, options and statuses; each subcommand on a machine without a GPU, with what it
# says held against computations of this test's own; damaged and hostile files, under sanitizers; and on the emulated GPU that
# `check` passes, and that it finds a GPU that computes wrongly and one that stops. Prints PASS, FAIL and SKIP lines; run from
# the repository root. NVRTC is found as usual, or named by MOE_ROUTE_NVRTC_PATH.
set -u
root=$PWD
program=$root/build/moe_route
sanitized=$root/build/sanitized_command
failed=0
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
export MOE_ROUTE_CACHE_DIR="$work/cache" HOME="$work" CUDA_VISIBLE_DEVICES=-1
pass() { echo "PASS $1"; }
fail() {
    echo "FAIL $1: $(echo "$2" | head -c 400 | tr '\n' ' ')"
    failed=1
}

# runs NAME STATUS COMMAND...: the command ends with this status; stdout is left in $work/out, stderr in $work/err.
runs() {
    name=$1
    want=$2
    shift 2
    "$@" >"$work/out" 2>"$work/err"
    status=$?
    if [ $status -eq "$want" ]; then pass "$name"; else fail "$name" "status $status instead of $want: $(tail -n 3 "$work/out" "$work/err")"; fi
}
# says NAME TEXT [FILE]: the last output, or stderr, holds the text.
says() { if grep -qF -e "$2" "$work/${3:-out}"; then pass "$1"; else fail "$1" "\"$2\" isn't in: $(cat "$work/${3:-out}")"; fi; }
refuses() { # NAME STATUS TEXT COMMAND...
    name=$1
    text=$3
    status=$2
    shift 3
    runs "refuses_$name" "$status" "$@"
    says "refuses_${name}_by_name" "$text" err
}

if ! command -v python3 >/dev/null; then
    echo "SKIP command: python3 isn't there"
    exit 0
fi
python() { python3 "$work/own.py" "$@"; }
is_json() { if python3 -m json.tool "$2" >"$work/json" 2>&1; then pass "$1"; else fail "$1" "$(cat "$work/json")"; fi; }
is_svg() { if python svg "$2" >"$work/xml" 2>&1; then pass "$1"; else fail "$1" "$(cat "$work/xml")"; fi; }
holds() { # NAME ARGUMENT...: own.py finds what it is asked for
    name=$1
    shift
    if python "$@" >"$work/why" 2>&1; then pass "$name"; else fail "$name" "$(tail -n 1 "$work/why")"; fi
}

# What the command should say, computed here in another language.
cat >"$work/own.py" <<'PY'
import json, math, random, struct, sys, xml.dom.minidom

def f32(x): return struct.unpack('<f', struct.pack('<f', x))[0]
def logits(tokens, experts, seed):
    r = random.Random(seed)
    return [[f32(r.gauss(0, 2)) for _ in range(experts)] for _ in range(tokens)]
def npy(path, rows, code='f', descr='<f4', shape=None, fortran='False', version=1, extra=b''):
    header = "{'descr': '%s', 'fortran_order': %s, 'shape': %s, }" % (descr, fortran, shape or '(%d, %d)' % (len(rows), len(rows[0])))
    size = 10 if version == 1 else 12
    header += ' ' * (-(size + len(header) + 1) % 64) + '\n'
    with open(path, 'wb') as f:
        f.write(b'\x93NUMPY' + bytes([version, 0]) + struct.pack('<H' if version == 1 else '<I', len(header)) + header.encode())
        for row in rows: f.write(struct.pack('<%d%s' % (len(row), code), *row))
        f.write(extra)
def softmax(row):
    top = max(row); e = [math.exp(x - top) for x in row]; return [x / sum(e) for x in e]
def qwen(row, k):
    p = softmax(row); ids = sorted(range(len(row)), key=lambda e: (-row[e], e))[:k]
    return ids, [p[e] for e in ids]
def deepseek(row, k, bias, groups, kept, scale):
    score = [1 / (1 + math.exp(-x)) for x in row]; order = [s + b for s, b in zip(score, bias)]
    size = len(row) // groups
    value = [sum(sorted(order[g * size:(g + 1) * size])[-2:]) for g in range(groups)]
    best = sorted(range(groups), key=lambda g: -value[g])[:kept]
    ids = sorted((e for e in range(len(row)) if e // size in best), key=lambda e: (-order[e], e))[:k]
    total = sum(score[e] for e in ids)
    return ids, [score[e] / total * scale for e in ids]
def same(got, want):
    for t, (ids, weights) in enumerate(want):
        if got['ids'][t] != ids: sys.exit('token %d: %s instead of %s' % (t, got['ids'][t], ids))
        for a, b in zip(got['weights'][t], weights):
            if abs(a - b) > 2e-6 * b: sys.exit('token %d: weight %r instead of %r' % (t, a, b))
def counts(got):
    ids, experts, k = got['ids'], got['experts'], got['top_k']
    per = [sum(e in row for row in ids) for e in range(experts)]
    if got['tokens_per_expert'] != per: sys.exit('tokens_per_expert is %s instead of %s' % (got['tokens_per_expert'], per))
    pairs = {(a, b): sum(a in row and b in row for row in ids) for a in range(experts) for b in range(a + 1, experts)}
    wanted = sorted(((-n, p) for p, n in pairs.items() if n), key=lambda x: (x[0], x[1]))[:32]
    if [(-p['tokens'], (p['a'], p['b'])) for p in got['most_together']] != wanted: sys.exit('most_together is %s' % got['most_together'])
    batch = 1
    for row in got['distinct_experts']:
        groups = [ids[i:i + batch] for i in range(0, len(ids) - batch + 1, batch)]
        mean = sum(len({e for r in g for e in r if e >= 0}) for g in groups) / len(groups)
        if row['batch'] != batch or abs(row['mean'] - mean) > 1e-4 * mean: sys.exit('distinct: %s, wanted %d %g' % (row, batch, mean))
        if abs(row['uniform'] - experts * (1 - (1 - k / experts) ** batch)) > 1e-3: sys.exit('uniform: %s' % row)
        batch *= 2
    if batch <= len(ids): sys.exit('no batch of %d' % batch)

what, arguments = sys.argv[1], sys.argv[2:]
if what == 'svg':
    text = open(arguments[0]).read()
    root = xml.dom.minidom.parseString(text).documentElement
    width, height = float(root.getAttribute('width')), float(root.getAttribute('height'))
    if 'nan' in text or 'inf' in text.replace('info', ''): sys.exit('a number is none')
    for name, far in (('x', width), ('y', height), ('cx', width), ('cy', height), ('x1', width), ('y1', height)):
        for tag in ('text', 'rect', 'circle', 'line'):
            for node in root.getElementsByTagName(tag):
                at = node.getAttribute(name)
                if at and not 0 <= float(at) <= far: sys.exit('%s: %s is %s' % (tag, name, at))
    labels = [(float(n.getAttribute('x')), float(n.getAttribute('y')), len(n.firstChild.data)) for n in root.getElementsByTagName('text') if 'label' in n.getAttribute('class')]
    for i, a in enumerate(labels):
        if a[0] + 8.2 * a[2] > width: sys.exit('a label ends beyond the picture')
        for b in labels[:i]:
            if a[0] == b[0] and abs(a[1] - b[1]) < 11: sys.exit('labels overlap')
    if 'prefers-color-scheme:dark' not in text: sys.exit('there are no dark colours')
elif what == 'make':
    folder = arguments[0]
    rows = logits(70, 60, 1)
    npy(folder + '/a.npy', rows)
    npy(folder + '/two.npy', rows, version=2)
    open(folder + '/a.f32', 'wb').write(b''.join(struct.pack('<60f', *r) for r in rows))
    halves = [[struct.unpack('<e', struct.pack('<e', x))[0] for x in r] for r in rows]
    npy(folder + '/a.f16.npy', halves, 'e', '<f2')
    open(folder + '/a.bf16', 'wb').write(b''.join(struct.pack('<I', struct.unpack('<I', struct.pack('<f', x))[0])[2:] for r in rows for x in r))
    npy(folder + '/v3.npy', logits(40, 64, 2))
    r = random.Random(3)
    npy(folder + '/bias.npy', [[f32(r.gauss(0, .2)) for _ in range(64)]], shape='(64,)')
    open(folder + '/trace.txt', 'w').write('# ids\n' + ''.join(' '.join(map(str, r.sample(range(24), 4))) + '\n' for _ in range(37)) + '\n7,7, 3 7\n-1 2\t2 -1 # a remark\n')
    # hostile ones
    whole = open(folder + '/a.npy', 'rb').read()
    for n in (0, 5, 6, 9, 11, 40, 127, 128, 131, len(whole) - 1, len(whole) - 240): open(folder + '/cut_%d.npy' % n, 'wb').write(whole[:n])
    npy(folder + '/more.npy', rows, extra=b'1234')
    npy(folder + '/fortran.npy', rows, fortran='True')
    npy(folder + '/f64.npy', rows, 'd', '<f8')
    npy(folder + '/object.npy', rows, descr='|O')
    npy(folder + '/three.npy', rows, shape='(7, 10, 60)')
    npy(folder + '/scalar.npy', [[1.0]], shape='()')
    npy(folder + '/huge.npy', rows, shape='(99999999999999999999999, 60)')
    npy(folder + '/wraps.npy', rows, shape='(4611686018427387904, 4)')
    npy(folder + '/negative.npy', rows, shape='(-70, 60)')
    npy(folder + '/empty.npy', [[]], shape='(0, 60)')
    npy(folder + '/no_columns.npy', [[]], shape='(60, 0)')
    open(folder + '/long.npy', 'wb').write(b'\x93NUMPY\x02\x00\xff\xff\xff\xff' + b' ' * 200)
    open(folder + '/odd.f32', 'wb').write(b'12345')
    for name, text in (('letters', '1 2 x\n'), ('big', '1 2 2048\n'), ('minus', '1 -2 3\n'), ('uneven', '1 2 3\n4 5\n'), ('overflow', '1 99999999999999999999\n'), ('nothing', '# only\n\n'), ('zero', '1 2\0 3\n'),
                       ('weight', '1:a 2:b\n'), ('glued', '1;2;3\n'), ('many', ' '.join(['1'] * 65) + '\n'), ('double', '1:0.5:3 2\n')): open(folder + '/trace_%s' % name, 'w').write(text)
    open(folder + '/trace_bytes', 'wb').write(bytes(range(1, 256)))
    config = {'model_type': 'qwen3_moe', 'num_experts': 16, 'num_experts_per_tok': 4, 'hidden_size': 128, 'moe_intermediate_size': 64, 'norm_topk_prob': True, 'torch_dtype': 'float16', 'n_group': None}
    def write(name, value): open(folder + '/config_%s.json' % name, 'w').write(value if isinstance(value, str) else json.dumps(value))
    write('good', config)
    write('nested', {'model_type': 'qwen3_vl_moe', 'hidden_size': 7, 'text_config': config})
    for n, (key, value) in enumerate((('num_experts', -1), ('num_experts', 1e300), ('num_experts', 2.5), ('num_experts', 'many'), ('num_experts', [16, 8]), ('num_experts', {}), ('hidden_size', True), ('norm_topk_prob', 'yes'), ('model_type', 7),
                       ('router_jitter_noise', 'x'), ('scoring_func', 3))):
        write('bad_%d_%s' % (n, key), dict(config, **{key: value}))
    write('bad_array', [1, 2]); write('bad_empty', ''); write('bad_deep', '[' * 100000); write('bad_text', 'PK\x03\x04'); write('bad_cut', json.dumps(config)[:-3]); write('bad_untyped', {'num_experts': 16})
elif what == 'qwen': same(json.load(open(arguments[0])), [qwen(r, 5) for r in logits(70, 60, 1)])
elif what == 'halves':
    cut = (lambda x: struct.unpack('<e', struct.pack('<e', x))[0]) if arguments[1] == 'f16' else (lambda x: struct.unpack('<f', b'\0\0' + struct.pack('<f', x)[2:])[0])
    same(json.load(open(arguments[0])), [qwen([cut(x) for x in r], 5) for r in logits(70, 60, 1)])
elif what == 'deepseek':
    r = random.Random(3); bias = [f32(r.gauss(0, .2)) for _ in range(64)]
    same(json.load(open(arguments[0])), [deepseek(row, 6, bias, 8, 3, 2.5) for row in logits(40, 64, 2)])
elif what == 'counts': counts(json.load(open(arguments[0])))
elif what == 'csv': # against the JSON of the same run
    got = json.load(open(arguments[1])); lines = open(arguments[0]).read().splitlines()
    want = ['token,slot,id,weight'] + ['%d,%d,%d,%.9g' % (t, j, got['ids'][t][j], got['weights'][t][j]) for t in range(got['tokens']) for j in range(got['top_k'])]
    for a, b in zip(lines, want):
        if a.rsplit(',', 1)[0] != b.rsplit(',', 1)[0] or (b[0] != 't' and abs(float(a.rsplit(',', 1)[1]) - float(b.rsplit(',', 1)[1])) > 1e-9): sys.exit('%s instead of %s' % (a, b))
    if len(lines) != len(want): sys.exit('%d lines' % len(lines))
elif what == 'ids': # two runs agree
    if json.load(open(arguments[0]))['ids'] != json.load(open(arguments[1]))['ids']: sys.exit('other ids')
elif what == 'value': # FILE PATH WANTED
    value = json.load(open(arguments[0]))
    for key in arguments[1].split('.'): value = value[int(key)] if isinstance(value, list) else value[key]
    if json.dumps(value) != arguments[2]: sys.exit('%s is %s instead of %s' % (arguments[1], json.dumps(value), arguments[2]))
elif what == 'lines': # each line is JSON; the last one's keys are as given
    lines = [json.loads(line) for line in open(arguments[0])]
    for pair in arguments[1:]:
        key, want = pair.split('=')
        if json.dumps(lines[-1][key]) != want: sys.exit('%s is %s instead of %s' % (key, json.dumps(lines[-1][key]), want))
    if len(lines) != lines[-1]['variants'] + 1: sys.exit('%d lines for %d variants' % (len(lines), lines[-1]['variants']))
PY
python make "$work" || exit 1

# ---- help, options, statuses ----
runs help 0 "$program" --help
for c in info warm bench route check; do
    says "help_names_$c" "  $c " out
done
runs no_command 2 "$program"
runs version 0 "$program" --version
says version_is_the_headers "moe_route $(sed -n 's/^#define MOE_ROUTE_VERSION "\(.*\)"$/\1/p' moe_route.h)"
for c in info warm bench route check; do
    runs "help_of_$c" 0 "$program" "$c" --help
    says "help_of_${c}_tells_statuses" "Status: 0"
    # every option that the page shows is one that the command takes
    sed -n "/^## $c/,/^## /p" docs/command.md | grep -o -e '--[a-z0-9-]*' | sort -u >"$work/page"
    missing=
    while read -r option; do grep -q -e "$option" "$work/out" || missing="$missing $option"; done <"$work/page"
    if [ -z "$missing" ] && [ -s "$work/page" ]; then pass "page_of_${c}_is_true"; else fail "page_of_${c}_is_true" "docs/command.md shows$missing"; fi
done
refuses an_unknown_command 2 "the nearest is warm" "$program" wram
refuses an_unknown_option 2 "there is no option --expert; the nearest is --experts" "$program" warm --expert 4
refuses a_misspelt_option 2 "the nearest is --tokens" "$program" bench --tokesn 4
refuses a_missing_value 2 "--arch needs a value" "$program" warm --arch
refuses a_value_of_a_flag 2 "--json takes no value" "$program" info --json=yes
refuses a_word 2 "--format is \"int5\"; the nearest is int4" "$program" warm --format int5
refuses a_number 2 "--experts is \"1x\"; allowed is a whole number" "$program" route --experts 1x
refuses a_stray_argument 2 "\"there\" is no option" "$program" info there
refuses no_architecture 2 "--arch is missing" "$program" warm --experts 8 --top-k 2
refuses an_architecture 2 "--arch is \"75\"" "$program" warm --experts 8 --top-k 2 --arch 75
refuses an_unknown_model 2 "qwen3_moe" "$program" warm --model qwen3moe --experts 8 --top-k 2 --arch 80
refuses a_model_without_top_k 2 "num_experts_per_tok" "$program" warm --model qwen3_moe --experts 8 --arch 80
refuses no_format 2 "--format doesn't say" "$program" warm --experts 8 --top-k 2 --hidden 64 --intermediate 64 --arch 80
refuses a_wrong_group_size 2 "group_size is 48" "$program" warm --experts 8 --top-k 2 --hidden 64 --intermediate 64 --format int4 --group-size 48 --arch 80 --pack "$work/x.moep"
refuses two_inputs 2 "both are given" "$program" route --logits "$work/a.npy" --trace "$work/trace.txt"
refuses a_bias_that_is_missing 2 "--selection-bias FILE" "$program" route --model deepseek_v3 --top-k 6 --groups 8 --topk-groups 3 --scale 2.5 --logits "$work/v3.npy"
refuses an_unknown_check 2 "no check has such a name" "$program" check nonsense
refuses a_full_disk 5 "No space left" sh -c "$program info >/dev/full"

# ---- info ----
rm -rf "$work/cache"
runs info 0 "$program" info
says info_tells_no_gpu "GPU      none"
says info_tells_the_cache_is_absent "absent"
if [ -e "$work/cache" ]; then fail info_creates_nothing "$(ls -R "$work/cache")"; else pass info_creates_nothing; fi
runs info_json 0 "$program" info --json
is_json info_json_is_sound "$work/out"
holds info_json_tells_the_state value "$work/out" cache.state '"absent"'
mkdir -m 777 "$work/open"
runs info_of_an_open_folder 0 "$program" info --cache-dir "$work/open" --json
holds info_refuses_an_open_folder value "$work/out" cache.state '"refused"'
says info_tells_why "other users can write to it"
runs info_of_no_cache 0 env MOE_ROUTE_CACHE_DIR=off "$program" info --json
holds info_tells_the_cache_is_off value "$work/out" cache.state '"off"'
runs info_without_nvrtc 0 env MOE_ROUTE_NVRTC_PATH=/nonexistent/libnvrtc.so "$program" info
says info_tells_where_it_looked /nonexistent/libnvrtc.so
runs info_without_nvrtc_json 0 env MOE_ROUTE_NVRTC_PATH=/nonexistent/libnvrtc.so "$program" info --json
holds info_tells_nvrtc_fails value "$work/out" nvrtc.works false

# ---- warm ----
layer="--model qwen3_moe --experts 16 --top-k 4 --hidden 128 --intermediate 64 --format int4 --group-size 32"
if "$program" info --json | grep -q '"works": true'; then
    # shellcheck disable=SC2086
    runs warm_a_pack 0 "$program" warm $layer --arch 80,90 --pack "$work/model.moep" --json
    holds warm_tells_variants lines "$work/out" variants=6 compiled=6 cache=null
    if [ -e "$work/cache" ]; then fail warm_a_pack_leaves_the_cache "$(ls "$work/cache")"; else pass warm_a_pack_leaves_the_cache; fi
    # the pack and the cache serve a program that makes the same layer
    one="--experts 32 --top-k 4 --hidden 64 --operations expand,combine --arch 90"
    # shellcheck disable=SC2086
    runs warm_operations 0 "$program" warm $one --pack "$work/one.moep"
    out=$(MOE_ROUTE_CACHE_DIR=off MOE_ROUTE_NVRTC_PATH=/nonexistent build/one_layer --pack "$work/one.moep")
    case $out in "OK hits 0 misses 0 packs 2 compiled 0 nvrtc 0 "*) pass a_warm_pack_serves ;; *) fail a_warm_pack_serves "$out" ;; esac
    # shellcheck disable=SC2086
    runs warm_a_cache 0 "$program" warm $one --json
    holds warm_a_cache_compiles lines "$work/out" variants=2 compiled=2 pack=null
    out=$(MOE_ROUTE_NVRTC_PATH=/nonexistent build/one_layer)
    case $out in "OK hits 2 misses 0 "*"compiled 0 nvrtc 0 "*) pass a_warm_cache_serves ;; *) fail a_warm_cache_serves "$out" ;; esac
    # shellcheck disable=SC2086
    runs warm_again 0 env MOE_ROUTE_NVRTC_PATH=/nonexistent "$program" warm $one --json
    holds warm_again_compiles_nothing lines "$work/out" variants=2 compiled=0
    runs info_of_a_warm_cache 0 "$program" info --json
    holds info_lists_the_variants value "$work/out" variants.1.target 90
    holds info_tells_it_is_used value "$work/out" cache.state '"used"'
    runs info_variants 0 "$program" info --variants
    says info_shows_constants "ROW_BYTES="
    find "$work/cache" -name '*.moec' | head -n 1 | while read -r entry; do printf x >>"$entry"; done
    runs info_of_damage 0 "$program" info
    says info_tells_damage "damaged"
    rm -rf "$work/cache"
    # shellcheck disable=SC2086
    runs warm_two_layers 0 "$program" warm $layer --arch 90 --pack "$work/two.moep" --json --and --down-format q8_0
    holds warm_two_layers_share lines "$work/out" variants=6 compiled=6 # the router; h is in the order that its reader wants, and blocks of GGUF have a combine of their own
    # shellcheck disable=SC2086
    runs warm_in_lines 0 "$program" warm $layer --arch 90 --pack "$work/two.moep"
    says warm_in_lines_names_kernels "sm_90   matmul_bulk compiled"
    says warm_in_lines_sums_up "3 variants for 1 architecture"
    # on a terminal there is a bar, and each of its states is one line
    # shellcheck disable=SC2086
    runs warm_on_a_terminal 0 env LC_ALL=C.UTF-8 python3 -c 'import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))' "$program" warm $layer --arch 90 --pack "$work/two.moep"
    says warm_draws_a_bar "░"
    says warm_names_what_it_compiles "3/3"
    # shellcheck disable=SC2086
    refuses an_unwritable_pack 5 "nowhere" "$program" warm $one --pack "$work/nowhere/x.moep"
    # shellcheck disable=SC2086
    refuses an_unusable_cache 5 "other users can write to it" "$program" warm $one --cache-dir "$work/open"
    if "$program" warm --config "$work/config_good.json" --arch 90 --format f16 --pack "$work/c.moep" --json >"$work/config.out" 2>"$work/err"; then
        # the same numbers as options make the same variants
        "$program" warm --model qwen3_moe --experts 16 --top-k 4 --hidden 128 --intermediate 64 --norm-topk-prob yes --dtype f16 --format f16 --arch 90 --pack "$work/n.moep" --json >"$work/numbers.out" 2>&1
        variants() { sed -n 's/.*"variant": "\(.*\)".*/\1/p' "$1" | sort; }
        if [ "$(variants "$work/config.out")" = "$(variants "$work/numbers.out")" ] && [ "$(variants "$work/config.out" | wc -l)" -eq 3 ]; then pass config_gives_the_numbers; else fail config_gives_the_numbers "$(cat "$work/config.out" "$work/numbers.out")"; fi
        "$program" warm --config "$work/config_nested.json" --arch 90 --format f16 --pack "$work/c.moep" --json >"$work/nested.out" 2>&1
        if [ "$(variants "$work/nested.out")" = "$(variants "$work/numbers.out")" ]; then pass config_takes_the_text_part; else fail config_takes_the_text_part "$(cat "$work/nested.out")"; fi
        for config in "$work"/config_bad_*; do
            runs "refuses_$(basename "$config" .json)" 5 "$sanitized" warm --config "$config" --arch 90 --format f16 --pack "$work/c.moep"
            says "refuses_$(basename "$config" .json)_by_name" "$config" err
        done
        runs a_config_that_options_correct 0 "$program" warm --config "$work/config_good.json" --top-k 2 --experts 8 --arch 90 --format f16 --pack "$work/c.moep" --json
        says options_come_before_the_config "E=8 K=2"
    else
        says without_cjson_it_says_so "without cJSON" err
        echo "SKIP command_config: libcjson-dev isn't there"
    fi
else
    echo "SKIP command_warm: there is no NVRTC"
fi
refuses no_nvrtc 4 "MOE_ROUTE_NVRTC_PATH" env MOE_ROUTE_NVRTC_PATH=/nonexistent "$program" warm --experts 8 --top-k 2 --hidden 64 --operations expand --arch 80 --pack "$work/x.moep"
if ${CC:-cc} -w -O0 -I. -o "$work/without" tools/moe_route/main.c -lm -ldl -lpthread 2>"$work/cc"; then
    refuses config_without_cjson 2 "libcjson-dev" "$work/without" warm --config "$work/config_good.json" --arch 80
else
    fail builds_without_cjson "$(cat "$work/cc")"
fi

# ---- bench ----
refuses bench_without_a_gpu 3 "there is no GPU" "$program" bench
if make -s bench BENCH=--help >"$work/out" 2>&1; then says make_bench_passes_options "usage: moe_route bench"; else fail make_bench "$(cat "$work/out")"; fi
runs bench_from_a_file 0 "$program" bench --from bench/results/h200-bench.csv --csv "$work/b.csv" --json "$work/b.json" --svg "$work/b.svg"
if cmp -s bench/results/h200-bench.csv "$work/b.csv"; then pass bench_csv_comes_back; else fail bench_csv_comes_back "$(diff bench/results/h200-bench.csv "$work/b.csv" | head -n 4)"; fi
# its rows are those of the run's own table, which was rounded once and not from three decimals
awk '/^(layer|  [a-z_]+|combine|router \+ maps) /' bench/results/h200-bench.txt | sed 's/ *$//' >"$work/want"
awk '/^(layer|  [a-z_]+|combine|router \+ maps) /' "$work/out" | sed 's/ *$//' >"$work/got"
paste -d '\n' "$work/want" "$work/got" | awk 'NR % 2 { n = split($0, a); next } { m = split($0, b); if (m != n) { print; next }
    for (i = 1; i <= n; i++) {
        d = a[i] - b[i]
        digits = index(a[i], ".") ? length(a[i]) - index(a[i], ".") : 0
        if (a[i] != b[i] && (a[i] !~ /^[0-9.]+$/ || (d < 0 ? -d : d) > 1.01 / 10 ^ digits)) { print; next }
    } }' >"$work/differ"
if [ -s "$work/got" ] && [ ! -s "$work/differ" ]; then pass bench_results_agree; else fail bench_results_agree "$(head -n 4 "$work/differ")"; fi
is_json bench_json_is_sound "$work/b.json"
holds bench_json_has_the_rows value "$work/b.json" rows.0.us "$(sed -n 2p bench/results/h200-bench.csv | awk -F, '{ print $(NF - 1) }')"
is_svg bench_svg_is_sound "$work/b.svg"
runs bench_json_alone 0 "$program" bench --from bench/results/h200-bench.csv --json -
is_json bench_json_is_alone_on_stdout "$work/out"
printf 'what,shape,dtype,tokens,distinct,megabytes,floor_us,us,target_us\nlayer,x,f16,1,8,1,nan,2,3\n' >"$work/bad1.csv"
printf 'what,shape,dtype,tokens,distinct,megabytes,floor_us,us,target_us\nlayer,"x,f16,1,8,1,1,2,3\n' >"$work/bad2.csv"
printf 'what,shape,dtype,tokens,distinct,megabytes,floor_us,us,target_us\nlayer,x,f16,0,8,1,1,2,3\n' >"$work/bad3.csv"
printf 'what,else\n' >"$work/bad4.csv"
head -c 3000 /dev/urandom >"$work/bad5.csv"
{ sed -n 1p bench/results/h200-bench.csv; head -c 2000 /dev/zero | tr '\0' 'x'; } >"$work/bad6.csv"
for n in 1 2 3 4 5 6; do runs "bench_refuses_file_$n" 5 "$sanitized" bench --from "$work/bad$n.csv" --svg "$work/bad.svg"; done
runs bench_takes_one_row 0 sh -c "sed -n 1,2p bench/results/h200-bench.csv >'$work/row.csv' && $sanitized bench --from '$work/row.csv' --svg '$work/row.svg'"
is_svg bench_svg_of_one_row_is_sound "$work/row.svg"

# ---- route ----
runs route_npy 0 "$sanitized" route --model qwen3_moe --top-k 5 --norm-topk-prob no --logits "$work/a.npy" --json "$work/r.json" --csv "$work/r.csv" --text "$work/r.txt" --svg "$work/r.svg"
says route_draws_on_the_terminal "Tokens per expert"
is_json route_json_is_sound "$work/r.json"
holds route_gives_ids_and_weights qwen "$work/r.json"
holds route_counts counts "$work/r.json"
holds route_csv_agrees csv "$work/r.csv" "$work/r.json"
is_svg route_svg_is_sound "$work/r.svg"
for file in two.npy a.f32; do
    runs "route_$file" 0 "$program" route --model qwen3_moe --experts 60 --top-k 5 --norm-topk-prob no --logits "$work/$file" --json "$work/r2.json"
    holds "route_${file}_agrees" qwen "$work/r2.json"
done
runs route_f16 0 "$program" route --top-k 5 --logits "$work/a.f16.npy" --json "$work/r2.json"
holds route_f16_agrees halves "$work/r2.json" f16
runs route_bf16 0 "$program" route --experts 60 --top-k 5 --type bf16 --logits "$work/a.bf16" --json "$work/r2.json"
holds route_bf16_agrees halves "$work/r2.json" bf16
runs route_groups 0 "$program" route --model deepseek_v3 --top-k 6 --groups 8 --topk-groups 3 --scale 2.5 --selection-bias "$work/bias.npy" --logits "$work/v3.npy" --json "$work/r3.json"
holds route_groups_agree deepseek "$work/r3.json"
runs route_fields 0 "$program" route --score sigmoid --renormalize sum --group-rule top2_sum --groups 8 --topk-groups 3 --scale 2.5 --top-k 6 --selection-bias "$work/bias.npy" --logits "$work/v3.npy" --json "$work/r4.json"
holds route_fields_agree deepseek "$work/r4.json"
runs route_trace 0 "$sanitized" route --trace "$work/trace.txt" --json "$work/t.json" --svg "$work/t.svg" --text "$work/t.txt"
holds route_trace_counts counts "$work/t.json"
is_svg route_trace_svg_is_sound "$work/t.svg"
runs route_reads_its_own_text 0 "$program" route --trace "$work/r.txt" --experts 60 --json "$work/r5.json"
holds route_text_comes_back ids "$work/r5.json" "$work/r.json"
runs route_json_alone 0 "$program" route --trace "$work/trace.txt" --json -
is_json route_json_is_alone_on_stdout "$work/out"
printf '5\n' >"$work/one.txt"
runs route_one_token 0 "$sanitized" route --trace "$work/one.txt" --svg "$work/one.svg"
is_svg route_svg_of_one_token_is_sound "$work/one.svg"
printf -- '-1 -1\n-1 -1\n' >"$work/none.txt"
runs route_no_expert 0 "$sanitized" route --trace "$work/none.txt" --svg "$work/none.svg" --json "$work/none.json"
is_svg route_svg_of_none_is_sound "$work/none.svg"
is_json route_json_of_none_is_sound "$work/none.json"
for file in "$work"/cut_*.npy more fortran f64 object three scalar huge wraps negative empty no_columns long; do
    case $file in /*) ;; *) file=$work/$file.npy ;; esac
    runs "route_refuses_$(basename "$file")" 5 "$sanitized" route --experts 60 --top-k 5 --logits "$file"
    says "route_refuses_$(basename "$file")_by_name" "$file" err
done
refuses odd_logits 5 "whole number" "$sanitized" route --experts 60 --top-k 5 --logits "$work/odd.f32"
refuses a_missing_file 5 "No such file" "$sanitized" route --top-k 5 --logits "$work/missing.npy"
refuses a_folder 5 "can't be read" "$sanitized" route --top-k 5 --logits "$work"
refuses another_number_of_experts 5 "the router has 64 logits" "$sanitized" route --experts 64 --top-k 5 --logits "$work/a.npy"
refuses a_bias_of_another_size 5 "--selection-bias" "$sanitized" route --experts 60 --top-k 5 --selection-bias "$work/bias.npy" --logits "$work/a.npy"
refuses too_many_of_few 2 "top_k" "$sanitized" route --top-k 61 --logits "$work/a.npy"
refuses an_id_beyond_the_experts 5 "there are 3 experts" "$sanitized" route --trace "$work/trace.txt" --experts 3
for file in letters big minus uneven overflow nothing zero weight glued many double bytes; do
    runs "route_refuses_trace_$file" 5 "$sanitized" route --trace "$work/trace_$file"
    says "route_refuses_trace_${file}_by_name" "$work/trace_$file" err
done

# ---- check ----
runs check_without_a_gpu 3 "$sanitized" check
says check_tells_that_no_gpu_was_there "PASS WITHOUT A GPU"
says check_tells_its_usual_seed "inputs: --seed 0"
runs check_json 3 "$program" check --json --seed 5
is_json check_json_is_sound "$work/out"
holds check_json_tells_the_result value "$work/out" result '"pass without a GPU"'
holds check_json_tells_the_seed value "$work/out" seed 5
# the seed of a report draws its inputs again: the same errors, and others from another seed
without_times() { sed 's/ *[0-9.]* s$//' "$work/out" >"$work/$1"; }
runs check_of_a_seed 3 "$program" check cpu.layer.int4 --seed 7
without_times seed_7
says check_tells_its_seed "inputs: --seed 7" seed_7
runs check_of_a_seed_again 3 "$program" check cpu.layer.int4 --seed "$(sed -n 's/^inputs: --seed //p' "$work/seed_7")"
without_times again
if cmp -s "$work/seed_7" "$work/again"; then pass check_repeats_a_report; else fail check_repeats_a_report "$(diff "$work/seed_7" "$work/again")"; fi
runs check_of_a_test_seed 3 env TEST_SEED=3 "$program" check cpu.layer.int4/64.f16 --seed 7
says check_tells_the_test_seed "inputs: --seed 7 and TEST_SEED=3"
runs check_of_another_seed 3 "$program" check cpu.layer.int4 --seed 8
without_times seed_8
if diff "$work/seed_7" "$work/seed_8" | grep -q "^> ok.*error"; then pass check_of_another_seed_draws_others; else fail check_of_another_seed_draws_others "the errors are the same"; fi
runs check_list 0 "$program" check --list
says check_lists_layers "gpu.layer.int4/64.f16"

# ---- on the emulated GPU ----
emulated() {
    env -u CUDA_VISIBLE_DEVICES LD_LIBRARY_PATH="$root/build/emulation" MOE_ROUTE_NVRTC_PATH="$root/build/emulation/libnvrtc.so.13" ASAN_OPTIONS=detect_leaks="${leaks:-1}" "$@"
}
shared="$root/build/emulation/cache"
if [ -e build/emulation/libcuda.so.1 ]; then
    runs emulated_info 0 emulated "$sanitized" info --json
    holds emulated_info_tells_the_gpu value "$work/out" devices.0.name '"emulated GPU"'
    runs emulated_check 0 emulated "$sanitized" check gpu.layer.int4/64.f16 gpu.given gpu.repeats gpu.graph --cache-dir "$shared"
    says emulated_check_says_pass "PASS: 5 checks"
    # what was compiled without a GPU is all that the GPU then needs
    small="--experts 8 --top-k 2 --hidden 64 --intermediate 64 --format int4 --group-size 32"
    # shellcheck disable=SC2086
    runs emulated_warm 0 emulated "$sanitized" warm $small --arch 90 --cache-dir "$work/warm"
    # shellcheck disable=SC2086
    runs emulated_bench 0 emulated env MOE_ROUTE_NVRTC_PATH=/nonexistent MOE_ROUTE_CACHE_DIR="$work/warm" "$sanitized" bench $small --tokens 1,2 --calls 2 --kernels --svg "$work/e.svg" --json "$work/e.json"
    is_svg emulated_bench_svg_is_sound "$work/e.svg"
    holds emulated_bench_counts_distinct value "$work/e.json" rows.0.distinct 2
    holds emulated_bench_counts_bytes value "$work/e.json" rows.0.megabytes 0.013824
    # a GPU that computes wrongly, and one whose barriers don't hold
    leaks=0
    for fault in fma barrier; do
        rm -rf "$work/include"
        cp -r build/emulation/include "$work/include"
        case $fault in
            fma) sed 's/__builtin_fmaf(a, b, c)/__builtin_fmaf(a, b, c * 1.01f)/' ;;
            barrier) sed 's/{ emulation->block_barrier(file, line); }/{ (void)file; (void)line; }/' ;;
        esac <build/emulation/include/device.h >"$work/include/device.h"
        if cmp -s build/emulation/include/device.h "$work/include/device.h"; then fail "emulated_fault_$fault" "nothing was replaced"; fi
        runs "check_finds_a_wrong_$fault" 1 emulated env MOE_ROUTE_EMULATION_INCLUDE="$work/include" "$sanitized" check gpu.given "gpu.layer.f32.f32 8x65" --json
        is_json "check_of_a_wrong_${fault}_is_sound" "$work/out"
        holds "check_of_a_wrong_${fault}_says_fail" value "$work/out" result '"fail"'
    done
    says check_leaves_out_what_a_lost_gpu_would_fail "context was lost"
else
    echo "SKIP command_emulated: build/emulation isn't built"
fi
exit $failed
